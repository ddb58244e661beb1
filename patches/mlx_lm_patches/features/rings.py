"""Seam: the mask of a batch of rings that took a single token and then a longer chunk.

Upstream's mask assumes that a chunk of several tokens meets a ring in order. After a
single token a full ring is not: the chunk puts it in order, which moves its padding,
and the mask made before that hides one token too many of each padded row. It comes to
this where a prompt's chunk is a single token: at the end of a message or of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..runtime import Runtime
from ..seam import Seam


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_mask(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1 and self.rotated and runtime.active:
            self._temporal_order()
        return original(self, N, window_size, return_array)

    return make_mask


SEAMS = [
    Seam(
        feature="rows",
        module="mlx_lm.models.cache",
        qualname="BatchRotatingKVCache.make_mask",
        kind="wrap",
        signature="(self, N, window_size=, return_array=)",
        bodies={"53f7f8f1f516b62a": "0.32.0 0.32.1 0.32.2"},
        why="puts a ring in order before the mask of a longer chunk, which is wrong for padded rows otherwise",
        until="upstream's mask fits the ring that the chunk leaves",
        build=build,
    ),
    Seam(
        feature="rows",
        module="mlx_lm.models.cache",
        qualname="BatchRotatingKVCache._temporal_order",
        kind="check",
        signature="(self)",
        bodies={"34c1d6e12f11799f": "0.32.0 0.32.1 0.32.2"},
        why="does in place what the chunk does after its mask was made",
        until="upstream's mask fits the ring that the chunk leaves",
    ),
]
