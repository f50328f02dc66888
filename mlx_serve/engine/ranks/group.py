"""The processes of one server, on one machine or several. Rank 0 sends messages to the others and gathers values.

Every call here is a collective: it returns when all ranks have made it, so all ranks make the same calls in the same
order. The calls use the models' stream, because two streams would race for the same connections. A message is JSON, so
bytes from a network become data and never code. Worker thread, unless a docstring says otherwise.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.errors import one_line

# A message's first part has this size, so that most messages are one collective. It begins with the number of ranks
# that were told to end, and the message's length.
_FRAME = 512
_HEAD = struct.Struct("<BI")
_ROOM = _FRAME - _HEAD.size


def join() -> Ranks | None:
    """The ranks that mlx.launch started. Waits until they are connected. None: this process is alone.

    Raises RuntimeError when they can't be reached.
    """
    group = mx.distributed.init()
    return Ranks(group) if group.size() > 1 else None


class Ranks:
    """``size`` processes, of which this one is ``rank``.

    ``leaving``, on ranks other than 0: set when this process was told to end. Rank 0 then ends all ranks.
    ``lost``: another rank is gone or out of step, and no collective works any more.
    """

    def __init__(self, group: Any) -> None:
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.group = group
        self.leaving = Event()
        self.lost = False
        # When the last collective ended (monotonic).
        self.beat_s = time.monotonic()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream of the models, which the collectives use too."""
        with mx.stream(generation_stream):
            yield

    def post(self, message: Sequence[Any]) -> bool:
        """On rank 0: send a message to all others. True: one of them was told to end. Raises EngineLost."""
        raw = json.dumps(message).encode()
        frame = _HEAD.pack(0, len(raw)) + raw[:_ROOM]
        n_leaving = self._sum(frame.ljust(_FRAME, b"\0"))[0]
        if len(raw) > _ROOM:
            self._sum(raw[_ROOM:])
        return n_leaving > 0

    def receive(self) -> list[Any]:
        """On other ranks: the next message. Raises EngineLost."""
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

    def agree(self, drawn: mx.array) -> mx.array:
        """The tokens that rank 0 drew, on all ranks.

        Equal seeds are not enough. Two kinds of GPU round differently, so two ranks could choose different tokens
        of about equal probability; one would end its answer while the other continues.
        """
        # A product rather than zeros: MLX could send a constant before what the model sends.
        agreed: mx.array = mx.distributed.all_sum(drawn * int(self.rank == 0), group=self.group)
        return agreed

    def _sum(self, raw: bytes) -> bytes:
        # The other ranks add zeros to rank 0's value.
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
    """Call ``on_stuck`` when no collective has ended for ``timeout_s`` seconds: a rank hangs or is disconnected.

    MLX does not return then. So this runs on its own thread, and can only end the process.
    """

    def run() -> None:
        while time.monotonic() - ranks.beat_s < timeout_s:
            time.sleep(min(1.0, timeout_s / 4))
        on_stuck()

    Thread(target=run, name="rank-watch", daemon=True).start()
