"""The wired limit: how many bytes of arrays Metal keeps resident. By default the weights', and nothing else's.

mlx-lm sets it to all that the device recommends. Metal then wires and unwires each KV cache as it grows and goes, which
has made Macs panic (docs/troubleshooting.md). MLX adds an array to what is resident only while it fits under the limit:
a limit of the weights' size, set once they are read, leaves no room for caches. Without Metal there is no such limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

import mlx.core as mx

log = logging.getLogger(__name__)

Wired: TypeAlias = Literal["weights", "recommended", "none"] | int


class WiredLimit:
    """Keeps the limit at what the operator chose. Worker thread.

    ``recommended_bytes``: the most that the device allows; None: it has no such limit. ``set_limit`` sets the limit and
    returns the former one.
    """

    def __init__(
        self,
        wanted: Wired = "weights",
        recommended_bytes: int | None = None,
        set_limit: Callable[[int], int] = mx.set_wired_limit,
    ) -> None:
        self._wanted = wanted
        self._most = recommended_bytes
        self._set_limit = set_limit
        self.n_bytes = 0

    def keep(self, weights_bytes: int | None = None) -> None:
        """Set the limit again, which mlx-lm changes whenever it makes a batch or ends one.

        ``weights_bytes``: those of all models in memory; None: as before. Nothing may be computed meanwhile.
        """
        if self._most is None:
            return
        if weights_bytes is not None:
            self.n_bytes = limit(self._wanted, weights_bytes, self._most)
        former = self._set_limit(self.n_bytes)
        if former != self.n_bytes:
            log.debug("wired limit: %d bytes, was %d", self.n_bytes, former)


def limit(wanted: Wired, weights_bytes: int, recommended_bytes: int) -> int:
    """The limit in bytes; never more than is recommended, since MLX refuses more."""
    n_bytes = {"weights": weights_bytes, "recommended": recommended_bytes, "none": 0}
    return min(recommended_bytes, wanted if isinstance(wanted, int) else n_bytes[wanted])


def recommended_bytes() -> int | None:
    """What the device recommends as the most; None without Metal."""
    found = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    return int(found) if found is not None else None
