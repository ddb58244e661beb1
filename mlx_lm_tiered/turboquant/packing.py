"""Unsigned integers of 2 to 8 bits in 32-bit words: a flat little-endian stream of bits, byte for byte mlx's own packing of quantized arrays."""

from __future__ import annotations

from functools import cache

import mlx.core as mx


def pack(indices: mx.array, bits: int) -> mx.array:
    """Integers (..., n) below 2^bits as uint32 (..., n * bits / 32); `n` is a multiple of 32."""
    if bits == 8:
        return indices.astype(mx.uint8).view(mx.uint32)
    # Eight values are `bits` bytes.
    eights = indices.astype(mx.uint32 if bits <= 4 else mx.uint64).reshape(*indices.shape[:-1], -1, 8)
    joined = (eights << _shifts(8, bits, eights.dtype)).sum(axis=-1, keepdims=True)
    found = ((joined >> _shifts(bits, 8, eights.dtype)) & 255).astype(mx.uint8)
    return found.reshape(*indices.shape[:-1], -1).view(mx.uint32)


def unpack(packed: mx.array, bits: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """What was packed, as floats (..., n)."""
    shape = (*packed.shape[:-1], packed.shape[-1] // bits)
    ones, zeros = mx.ones(shape, dtype), mx.zeros(shape, dtype)
    return mx.dequantize(packed, ones, zeros, group_size=32, bits=bits)


@cache
def _shifts(count: int, by: int, dtype: mx.Dtype) -> mx.array:
    made = mx.arange(0, count * by, by).astype(dtype)
    mx.eval(made)
    return made
