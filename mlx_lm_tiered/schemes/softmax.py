"""A running softmax over tiles of the keys (Milakov and Gimelshein, 2018), whatever keys and values are stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

# Scores that one tile may materialize, and from how many on a tile is finished before the next, in elements.
TILE = 1 << 24
LARGE = 1 << 19
SMALLEST_TILE, LARGEST_TILE = 256, 4096

Tile = Callable[[int, int], mx.array]


def tile_size(rows: int, heads: int, length: int) -> int:
    """Keys whose scores for so many queries are materialized at once."""
    fitting = TILE // max(1, rows * heads * length)
    return max(SMALLEST_TILE, min(LARGEST_TILE, fitting // 64 * 64))


def running(
    queries: mx.array, kv_heads: int, slots: int, width: int, scores_of: Tile, values_of: Tile, mask: Any, sinks: mx.array | None, tile: int | None
) -> mx.array:
    """Attention of `queries` (rows, heads, length, dim) in fp32 (rows, heads, length, width).

    `scores_of` and `values_of` get the first slot of a tile and the one behind its
    last. Scores are (rows, kv heads, queries of all its heads, tile), scaled; values
    (rows, kv heads, tile, width). `mask` is None, ``"causal"``, or booleans or
    summands that broadcast to (rows, heads, length, slots); `sinks` (heads,) are
    logits of a key with no value.
    """
    rows, heads, length = queries.shape[:3]
    shape = (rows, kv_heads, heads // kv_heads, length)
    size = tile or tile_size(rows, heads, length)
    lowest = mx.finfo(mx.float32).min
    if sinks is None:
        top, total = mx.full((*shape, 1), lowest), mx.zeros((*shape, 1))
    else:
        top = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1), (*shape, 1))
        total = mx.ones((*shape, 1))
    out = mx.zeros((*shape, width))
    for start in range(0, slots, size):
        stop = min(start + size, slots)
        scores = scores_of(start, stop).reshape(*shape, stop - start)
        scores = masked(scores, mask, start, stop, slots).astype(mx.float32)
        values = values_of(start, stop)
        highest = mx.maximum(top, scores.max(axis=-1, keepdims=True))
        weights = mx.exp(scores - highest)
        kept = mx.exp(top - highest)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        seen = weights.astype(values.dtype).reshape(rows, kv_heads, -1, stop - start) @ values
        out = out * kept + seen.reshape(*shape, -1).astype(mx.float32)
        top = highest
        if scores.size > LARGE:
            # mlx runs a hundred operations ahead, and allocates for them: large tiles are finished one by one.
            mx.eval(out, total, top)
    return (out / total).reshape(rows, heads, length, width)


def masked(scores: mx.array, mask: Any, start: int, stop: int, slots: int) -> mx.array:
    """Scores (rows, kv heads, heads of each, length, tile) with what the mask hides at the lowest value, as in mlx-lm."""
    if mask is None:
        return scores
    kv_heads, each, length = scores.shape[1:4]
    if isinstance(mask, str):
        first = slots - length
        if stop <= first + 1:
            return scores
        mask = mx.arange(first, slots)[:, None] >= mx.arange(start, stop)
    else:
        mask = mask[..., start:stop] if mask.shape[-1] == slots else mask
        if mask.ndim == 4:
            split = (1, 1) if mask.shape[1] == 1 else (kv_heads, each)
            mask = mask.reshape(mask.shape[0], *split, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask
