"""Attention over quantized KV: mlx-lm's own for few queries, tiles over the keys for more.

mlx-lm computes all scores of a chunk at once: 2048 queries over 32k keys with 32 heads
are 8 GB of them. Here a tile of keys and values is dequantized, its scores are folded
into a running softmax (Milakov and Gimelshein, 2018), and both are gone before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..kernels.choice import Kernels, on_cuda
from .caches import Triple
from .mixed import Rows

# Queries up to which it takes mlx-lm's way: decoding, and checking a draft. With more, a quantized
# product of matrices is slower than dequantizing a tile and multiplying that (on a CPU, four times).
FEW = 8
# Scores that one tile may materialize, and from how many on a tile is finished before the next, in elements.
TILE = 1 << 24
LARGE = 1 << 19
SMALLEST_TILE, LARGEST_TILE = 256, 4096


def build(upstream: Callable[..., mx.array], kernels: Kernels | None = None) -> Callable[..., mx.array]:
    """What stands in for `upstream`, mlx-lm's quantized_scaled_dot_product_attention: the same parameters, and `sinks`."""

    def attend(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8, sinks: Any = None
    ) -> mx.array:
        if isinstance(q_keys, Rows):
            return q_keys.attend(attend, queries, scale, mask, sinks)
        if kernels is not None:
            done = kernels.attend(queries, q_keys, q_values, scale, mask, sinks, bits, group_size)
            if done is not None:
                return done
        if sinks is None and _upstreams(queries, q_values, group_size):
            if mx.default_device().type == mx.cpu and queries.shape[1] > q_keys[0].shape[1]:
                return gathered(queries, q_keys, q_values, scale, mask, group_size, bits)
            return upstream(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits)
        keys, values = (Triple.of(side, bits, group_size) for side in (q_keys, q_values))
        return tiled(queries, keys, values, scale, mask, sinks)

    return attend


def _upstreams(queries: mx.array, values: Any, group_size: int) -> bool:
    length, dim = queries.shape[2:]
    # With grouped queries it gives values the dimension of keys.
    if _strided_unsupported() or values[1].shape[3] * group_size != dim:
        return False
    return length <= FEW


def gathered(queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int, bits: int) -> mx.array:
    """mlx-lm's quantized attention, number for number, with the queries of a group as rows of one product.

    mlx-lm has an axis of its own for them, along which mlx on the CPU copies keys and
    values, once for every query head.
    """
    rows, heads, length, dim = queries.shape
    kv_heads, slots = q_keys[0].shape[1:3]
    q = (queries * scale).reshape(rows, kv_heads, -1, dim)
    scores = mx.quantized_matmul(q, *q_keys, transpose=True, group_size=group_size, bits=bits)
    scores = _masked(scores.reshape(rows, kv_heads, -1, length, slots), mask, 0, slots, slots)
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, kv_heads, -1, slots)
    out = mx.quantized_matmul(weights, *q_values, transpose=False, group_size=group_size, bits=bits)
    return out.reshape(rows, heads, length, -1)


def _strided_unsupported() -> bool:
    """Whether `mx.quantized_matmul` fails on slices of a cache's buffers: mlx on CUDA has no implementation for them."""
    return on_cuda()


def tile_size(rows: int, heads: int, length: int) -> int:
    """Keys whose scores for so many queries are materialized at once."""
    fitting = TILE // max(1, rows * heads * length)
    return max(SMALLEST_TILE, min(LARGEST_TILE, fitting // 64 * 64))


def tiled(
    queries: mx.array, keys: Triple, values: Triple, scale: float, mask: Any, sinks: mx.array | None = None, tile: int | None = None
) -> mx.array:
    """Attention with a running softmax in fp32.

    `queries` (rows, heads, length, dim); `mask` None, ``"causal"``, or booleans or
    summands that broadcast to (rows, heads, length, slots); `sinks` (heads,), logits
    of a key with no value. Returns (rows, heads, length, value dim).
    """
    rows, heads, length, dim = queries.shape
    kv_heads, slots = keys[0].shape[1:3]
    shape = (rows, kv_heads, heads // kv_heads, length)
    size = tile or tile_size(rows, heads, length)
    q = (queries * scale).reshape(rows, kv_heads, -1, dim)
    lowest = mx.finfo(mx.float32).min
    if sinks is None:
        top, total = mx.full((*shape, 1), lowest), mx.zeros((*shape, 1))
    else:
        top = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1), (*shape, 1))
        total = mx.ones((*shape, 1))
    out = mx.zeros((*shape, values[1].shape[3] * values.group_size))
    for start in range(0, slots, size):
        stop = min(start + size, slots)
        k, v = _dequantize(keys, start, stop), _dequantize(values, start, stop)
        scores = (q @ k.swapaxes(-1, -2)).reshape(*shape, stop - start)
        scores = _masked(scores, mask, start, stop, slots).astype(mx.float32)
        highest = mx.maximum(top, scores.max(axis=-1, keepdims=True))
        weights = mx.exp(scores - highest)
        kept = mx.exp(top - highest)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        seen = weights.astype(v.dtype).reshape(rows, kv_heads, -1, stop - start) @ v
        out = out * kept + seen.reshape(*shape, -1).astype(mx.float32)
        top = highest
        if scores.size > LARGE:
            # mlx runs a hundred operations ahead, and allocates for them: large tiles are finished one by one.
            mx.eval(out, total, top)
    return (out / total).astype(queries.dtype).reshape(rows, heads, length, -1)


def _dequantize(side: Triple, start: int, stop: int) -> mx.array:
    return mx.dequantize(*(array[:, :, start:stop] for array in side), group_size=side.group_size, bits=side.bits)


def _masked(scores: mx.array, mask: Any, start: int, stop: int, slots: int) -> mx.array:
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
