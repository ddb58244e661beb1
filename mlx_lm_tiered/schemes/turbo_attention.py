"""Attention over TurboQuant KV without a kernel of ours, in tiles: the packed keys are multiplied as they are, values stay rotated.

Attention is linear in its values, so what is summed are rotated values, and the
output is rotated back once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..turboquant.codec import Encoded, decode_keys, decode_rotated, key_biases, key_scales, unrotate
from .fused import by_heads
from .softmax import running
from .turbo import Pair


def tiled(
    queries: mx.array, keys: Pair, values: Pair, scale: float, mask: Any, sinks: mx.array | None = None, *, packed: bool = True, tile: int | None = None
) -> mx.array:
    """Attention of `queries` (rows, heads, length, dim). Returns (rows, heads, length, value dim).

    With `packed`, scores are products with the packed keys, in fp32. That is for few
    queries; for more it is faster to decode a tile of keys and multiply that, in the
    queries' type. See `softmax.running` for `mask` and `sinks`.
    """
    rows, _, _, dim = queries.shape
    kv_heads, slots = keys[0].shape[1:3]
    width = values[1].shape[3] * values.group_size
    scaled = queries.astype(mx.float32) * scale
    q = (scaled if packed else scaled.astype(queries.dtype)).reshape(rows, kv_heads, -1, dim)

    def scores(start: int, stop: int) -> mx.array:
        held = _part(keys, start, stop)
        if not packed:
            return q @ decode_keys(held, keys.bits).astype(queries.dtype).swapaxes(-1, -2)
        scales, zeros = key_scales(held)
        return mx.quantized_matmul(q, held.packed, scales, key_biases(scales, zeros, keys.bits), group_size=keys.group_size, bits=keys.bits)

    def read(start: int, stop: int) -> mx.array:
        return decode_rotated(_part(values, start, stop), values.bits).astype(mx.float32 if packed else queries.dtype)

    out = running(queries, kv_heads, slots, width, scores, read, mask, sinks, tile)
    return unrotate(out).astype(queries.dtype)


def fused(queries: mx.array, keys: Pair, values: Pair, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
    """The same by mlx's fused kernel, over decoded keys and rotated values of some heads at a time; see `fused.by_heads`."""

    def sides(first: int, last: int) -> tuple[mx.array, mx.array]:
        k, v = (Encoded(*(array[:, first:last] for array in side)) for side in (keys, values))
        return decode_keys(k, keys.bits).astype(queries.dtype), decode_rotated(v, values.bits).astype(queries.dtype)

    rows, kv_heads, slots = keys[0].shape[:3]
    elements = rows * slots * (queries.shape[3] + values[1].shape[3] * values.group_size)
    out = by_heads(queries, kv_heads, elements, sides, scale, mask, sinks)
    return unrotate(out.astype(mx.float32)).astype(queries.dtype)


def _part(side: Pair, start: int, stop: int) -> Encoded:
    return Encoded(*(array[:, :, start:stop] for array in side))
