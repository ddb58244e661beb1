"""Seam: a batch of rings that took a single token, before a longer chunk of prompts.

Upstream's mask assumes that a chunk of several tokens meets a ring in order. After a
single token a full ring is not: the chunk puts it in order, which moves its padding,
and the mask made before that hides one token too many of each padded row. It comes to
this where a prompt's chunk is a single token: at the end of a message or of a step.
So rings are put in order first. (Upstream's tests hold its mask of such a ring to be right,
hence it stays as it is.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..runtime import Runtime
from ..seam import Seam


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def prompt(self: Any, tokens: list[list[int]]) -> Any:
        if runtime.active and any(len(row) > 1 for row in tokens):
            _put_in_order(self.prompt_cache)
        return original(self, tokens)

    return prompt


def _put_in_order(caches: Sequence[Any]) -> None:
    """For upstream's batch caches, and others of their form that have `_temporal_order`."""
    for cache in caches:
        _put_in_order(getattr(cache, "caches", ()))
        if hasattr(cache, "left_padding") and hasattr(cache, "_temporal_order"):
            cache._temporal_order()


SEAMS = [
    Seam(
        feature="rows",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch.prompt",
        kind="wrap",
        signature="(self, tokens)",
        bodies={"00f89ef82f148133": "0.32.0 0.32.1 0.32.2"},
        why="puts rings in order before a longer chunk, whose mask is wrong for padded rows otherwise",
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
