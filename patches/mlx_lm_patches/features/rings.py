"""A batch of rings that took a single token, before a longer chunk of prompts (see `prefill`).

Upstream's mask assumes that a chunk of several tokens meets a ring in order. After a
single token a full ring is not: the chunk puts it in order, which moves its padding,
and the mask made before that hides one token too many of each padded row. It comes to
this where a prompt's chunk is a single token: at the end of a message or of a step.
So rings are put in order first. (Upstream's tests hold its mask of such a ring to be right,
hence it stays as it is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..seam import Seam


def put_in_order(caches: Sequence[Any]) -> None:
    """For upstream's batch caches, and others of their form that have `_temporal_order`."""
    for cache in caches:
        put_in_order(getattr(cache, "caches", ()))
        if hasattr(cache, "left_padding") and hasattr(cache, "_temporal_order"):
            cache._temporal_order()


SEAMS = [
    Seam(
        feature="prefill",
        module="mlx_lm.models.cache",
        qualname="BatchRotatingKVCache._temporal_order",
        kind="check",
        signature="(self)",
        bodies={"34c1d6e12f11799f": "0.32.0 0.32.1 0.32.2"},
        why="does in place what the chunk does after its mask was made",
        until="upstream's mask fits the ring that the chunk leaves",
    ),
]
