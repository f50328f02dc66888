"""When the requests of an open loop go out: a Poisson process, the same for the same seed."""

from __future__ import annotations

import math
import random


def arrival_times(n: int, rate: float, seed: str) -> list[float]:
    """Seconds from the start of a round, the first at 0; all at 0 for a rate of infinity.

    Gaps are exponential, then scaled so that their mean is 1 / rate, as vLLM has it: otherwise a short round would
    offer a rate that is by chance another one.
    """
    if math.isinf(rate) or n < 2:
        return [0.0] * n
    rng = random.Random(f"{seed} arrivals")
    times = [0.0]
    for _ in range(n - 1):
        times.append(times[-1] + rng.expovariate(1.0))
    scale = (n - 1) / rate / times[-1]
    return [time * scale for time in times]
