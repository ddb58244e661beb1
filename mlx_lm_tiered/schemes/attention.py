"""Attention over quantized KV: mlx-lm's own for few queries, tiles over the keys for more, and on CUDA mlx's fused kernel by heads (`fused.py`).

mlx-lm computes all scores of a chunk at once: 2048 queries over 32k keys with 32 heads
are 8 GB of them. Here a tile of keys and values is dequantized, its scores are folded
into a running softmax (Milakov and Gimelshein, 2018), and both are gone before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.choice import Kernels, on_cuda
from ..kernels.layout import Layout
from . import turbo_attention
from .caches import Triple
from .fused import by_heads
from .held import Held, HeldRecords
from .lockstep import Lockstep, Single
from .mixed import Rows
from .softmax import masked, running
from .turbo import Pair

# Queries up to which it takes mlx-lm's way: decoding, and checking a draft. With more, a quantized
# product of matrices is slower than dequantizing a tile and multiplying that (on a CPU, four times).
FEW = 8


def caches_use(kernels: Kernels) -> None:
    """Have caches write and hand out their tokens in the ways of these kernels, where they are on."""
    Single.lean = kernels.state == "on"
    Lockstep.encoder = kernels.encode if Single.lean else None
    # On Metal mlx's own way over planes may be the one that serves.
    Lockstep.keeps_records = Single.lean and on_cuda()


def build(upstream: Callable[..., mx.array], kernels: Kernels | None = None) -> Callable[..., mx.array]:
    """What stands in for `upstream`, mlx-lm's quantized_scaled_dot_product_attention: the same parameters, and `sinks`."""

    @cache
    def without_kernel(layout: Layout) -> Callable[..., mx.array]:
        return partial(_turbo, layout) if layout.turbo else partial(_affine, upstream, layout)

    def attend(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8, sinks: Any = None
    ) -> mx.array:
        if isinstance(q_keys, Rows):
            return q_keys.attend(attend, queries, scale, mask, sinks)
        if isinstance(q_keys, HeldRecords):
            otherwise = without_kernel(q_keys.layout)
            if kernels is not None:
                done = kernels.attend_records(queries, q_keys.buffers[0], q_keys.record, q_keys.slots, scale, mask, sinks, otherwise)
                if done is not None:
                    return done
            return otherwise(queries, q_keys.cut(), q_values.cut(), scale, mask, sinks)
        if isinstance(q_keys, Held):
            layout, slots, buffers = q_keys.layout, q_keys.slots, (q_keys.buffers, q_values.buffers)
        else:
            layout = Layout.turboquant(q_keys.bits, q_values.bits) if isinstance(q_keys, Pair) else Layout.affine(bits, group_size)
            slots, buffers = q_keys[0].shape[2], (q_keys, q_values)
        otherwise = without_kernel(layout)
        if kernels is not None:
            done = kernels.attend(queries, *buffers, slots, scale, mask, sinks, layout, otherwise)
            if done is not None:
                return done
        if isinstance(q_keys, Held):
            q_keys, q_values = q_keys.cut(), q_values.cut()
        return otherwise(queries, q_keys, q_values, scale, mask, sinks)

    return attend


def _turbo(layout: Layout, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
    if _fused(queries):
        return turbo_attention.fused(queries, Pair.of(keys, layout.key_bits), Pair.of(values, layout.value_bits), scale, mask, sinks)
    packed = queries.shape[2] <= FEW and not _strided_unsupported()
    return turbo_attention.tiled(queries, Pair.of(keys, layout.key_bits), Pair.of(values, layout.value_bits), scale, mask, sinks, packed=packed)


def _affine(upstream: Callable[..., mx.array], layout: Layout, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
    bits, group_size = layout.key_bits, layout.group_size
    if sinks is None and _upstreams(queries, values, group_size):
        if mx.default_device().type == mx.cpu and queries.shape[1] > keys[0].shape[1]:
            return gathered(queries, keys, values, scale, mask, group_size, bits)
        return upstream(queries, keys, values, scale=scale, mask=mask, group_size=group_size, bits=bits)
    k, v = (Triple.of(side, bits, group_size) for side in (keys, values))
    return fused(queries, k, v, scale, mask, sinks) if _fused(queries) else tiled(queries, k, v, scale, mask, sinks)


def _fused(queries: mx.array) -> bool:
    """Whether mlx's fused kernel is faster than tiles for so many queries."""
    return queries.shape[2] > 1 and on_cuda()


def fused(queries: mx.array, keys: Triple, values: Triple, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
    """Attention of `queries` (rows, heads, length, dim) by heads; see `fused.by_heads`. Returns (rows, heads, length, value dim)."""

    def sides(first: int, last: int) -> tuple[mx.array, mx.array]:
        k, v = (side.dequantized(np.s_[:, first:last]).astype(queries.dtype) for side in (keys, values))
        return k, v

    elements = sum(side[1].shape[0] * side[1].shape[2] * side[1].shape[3] * side.group_size for side in (keys, values))
    return by_heads(queries, keys[0].shape[1], elements, sides, scale, mask, sinks)


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
    codes, scales, biases = q_keys
    scores = mx.quantized_matmul(q, codes, scales, biases, transpose=True, group_size=group_size, bits=bits)
    scores = masked(scores.reshape(rows, kv_heads, -1, length, slots), mask, 0, slots, slots)
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, kv_heads, -1, slots)
    codes, scales, biases = q_values
    out = mx.quantized_matmul(weights, codes, scales, biases, transpose=False, group_size=group_size, bits=bits)
    return out.reshape(rows, heads, length, -1)


def _strided_unsupported() -> bool:
    """Whether `mx.quantized_matmul` fails on slices of a cache's buffers: mlx on CUDA has no implementation for them."""
    return on_cuda()


def tiled(
    queries: mx.array, keys: Triple, values: Triple, scale: float, mask: Any, sinks: mx.array | None = None, tile: int | None = None
) -> mx.array:
    """Attention of `queries` (rows, heads, length, dim), in tiles; see `softmax.running`. Returns (rows, heads, length, value dim)."""
    kv_heads, slots = keys[0].shape[1:3]
    q = (queries * scale).reshape(queries.shape[0], kv_heads, -1, queries.shape[3])

    def scores(start: int, stop: int) -> mx.array:
        return q @ keys.dequantized(np.s_[:, :, start:stop]).swapaxes(-1, -2)

    def read(start: int, stop: int) -> mx.array:
        return values.dequantized(np.s_[:, :, start:stop])

    width = values[1].shape[3] * values.group_size
    return running(queries, kv_heads, slots, width, scores, read, mask, sinks, tile).astype(queries.dtype)
