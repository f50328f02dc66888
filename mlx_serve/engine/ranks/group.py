"""The processes of one server, on one machine or several: messages from rank 0 to the others, and questions to all.

Every call here is a collective one: it returns when all ranks have made it, so all make the same ones in the same
order. They go through the stream that models run in, for two streams would race for the same connections. A message is
JSON: bytes from a network may turn into data, never into code. Worker thread, but for what says otherwise.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import Sampler

from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.errors import one_line

# A message's first part has this size, so that most messages are one collective. It begins with the number of ranks
# that were told to end, and the message's length.
_FRAME = 512
_HEAD = struct.Struct("<BI")
_ROOM = _FRAME - _HEAD.size
# Tokens of different requests are at most so many different samplers'.
_MAX_SAMPLERS = 256


def join() -> Ranks | None:
    """The ranks that mlx.launch started; waits until they are connected. None: this process is alone.

    Raises RuntimeError when they can't be reached.
    """
    group = mx.distributed.init()
    return Ranks(group) if group.size() > 1 else None


class Ranks:
    """``size`` processes, of which this one is ``rank``.

    ``leaving``, on the other ranks: set when this process was told to end; rank 0 hears of it and ends all of them.
    ``lost``: another rank is gone or out of step, and no collective will work any more.
    """

    def __init__(self, group: Any) -> None:
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.group = group
        self.leaving = Event()
        self.lost = False
        # When the last collective was done (monotonic).
        self.beat_s = time.monotonic()
        # Wraps equal samplers once: mlx-lm samples a batch in one call when its rows share one.
        self.agree = lru_cache(maxsize=_MAX_SAMPLERS)(self._agreed)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Where models run, and so whatever asks other ranks."""
        with mx.stream(generation_stream):
            yield

    def post(self, message: Sequence[Any]) -> bool:
        """Rank 0: send a message to all others. True: one of them was told to end. Raises EngineLost."""
        raw = json.dumps(message).encode()
        frame = _HEAD.pack(0, len(raw)) + raw[:_ROOM]
        n_leaving = self._sum(frame.ljust(_FRAME, b"\0"))[0]
        if len(raw) > _ROOM:
            self._sum(raw[_ROOM:])
        return n_leaving > 0

    def receive(self) -> list[Any]:
        """The others: the next message. Raises EngineLost."""
        frame = self._sum(_HEAD.pack(self.leaving.is_set(), 0).ljust(_FRAME, b"\0"))
        n_bytes = _HEAD.unpack_from(frame)[1]
        raw = frame[_HEAD.size : _HEAD.size + n_bytes]
        if n_bytes > _ROOM:
            raw += self._sum(bytes(n_bytes - _ROOM))
        message: list[Any] = json.loads(raw)
        return message

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, in the order of ranks. Raises EngineLost."""
        mine = mx.array(list(values), dtype=mx.int64)
        with self.stream():
            rows = mx.distributed.all_gather(mine, group=self.group)
        return self._done(rows).reshape(self.size, -1).tolist()  # type: ignore[no-any-return]

    def _agreed(self, sampler: Sampler) -> Sampler:
        """A sampler whose tokens are rank 0's on all ranks.

        Equal seeds would not do: two kinds of GPU round differently, and where two tokens are about as likely one rank
        would take the one and end, while the other takes the other and goes on.
        """
        is_first = int(self.rank == 0)

        def sample(logprobs: mx.array) -> mx.array:
            # A product and not zeros: what depends on nothing would be sent before what the model sends.
            mine = sampler(logprobs) * is_first
            agreed: mx.array = mx.distributed.all_sum(mine, group=self.group)
            return agreed

        return sample

    def _sum(self, raw: bytes) -> bytes:
        # Others add zeros to what rank 0 sends.
        mine = mx.array(np.frombuffer(raw, dtype=np.uint8))
        with self.stream():
            total = mx.distributed.all_sum(mine, group=self.group)
        summed: bytes = self._done(total).tobytes()
        return summed

    def _done(self, result: mx.array) -> Any:
        if self.lost:
            raise EngineLost("another rank is lost")
        try:
            mx.eval(result)
        except RuntimeError as error:
            self.lost = True
            raise EngineLost(f"lost the other ranks: {one_line(error)}") from error
        self.beat_s = time.monotonic()
        return np.array(result)


def watch(ranks: Ranks, timeout_s: float, on_stuck: Callable[[], None]) -> None:
    """Call ``on_stuck`` when no collective has ended for ``timeout_s`` seconds: a rank hangs, or its cable is out.

    Nothing comes back from MLX then, so this is a thread of its own, and it can only end the process.
    """

    def run() -> None:
        while time.monotonic() - ranks.beat_s < timeout_s:
            time.sleep(min(1.0, timeout_s / 4))
        on_stuck()

    Thread(target=run, name="rank-watch", daemon=True).start()
