"""Computes when an open loop sends its requests: a Poisson process, determined by the seed."""

from __future__ import annotations

import math
import random


def arrival_times(n: int, rate: float, seed: str) -> list[float]:
    """The times in seconds from the start of a round. The first is 0; with an infinite rate all are 0.

    Gaps are exponential and then scaled to a mean of exactly 1 / rate, as in vLLM. Without scaling, the rate of a short
    round would depend on chance.
    """
    if math.isinf(rate) or n < 2:
        return [0.0] * n
    rng = random.Random(f"{seed} arrivals")
    times = [0.0]
    for _ in range(n - 1):
        times.append(times[-1] + rng.expovariate(1.0))
    scale = (n - 1) / rate / times[-1]
    return [time * scale for time in times]
