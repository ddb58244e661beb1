"""Keys and values to packed indices and scales, and back.

Arrays are (..., dim) of any float type; groups of 32 run along the last axis. Packed
indices are uint32, as mlx packs (`packing.py`). Scales and zero points are fp16. They
are rounded first and used as rounded, so that decoding undoes exactly what was done.

Keys: ``(index + zero) * scale``. With 8 bits the index is signed; what is packed is
the index plus 128 (its byte with the highest bit flipped), so that the packed plane
is one that `mx.quantized_matmul` multiplies, with the biases of `key_biases`. With
2, 4 or 5 bits it is unsigned.

Values: the index of the centroid nearest to each element of ``H(signs * v) / sqrt(dim)``
over its group's root mean square, which is the scale. The rotation is orthonormal, so
attention may sum rotated values and rotate its output back once.

Every step of encoding is one IEEE operation in fp32 in a fixed order, so the bytes do
not depend on how a device sums; but for mlx's Hadamard transform, whose order is the
device's.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from . import codebooks
from .codebooks import GROUP
from .packing import pack, unpack

LARGEST, SMALLEST = 65504.0, 2.0**-24  # of fp16
# Where a zero point is further out, the scale grows. fp16 has all integers up to 2048 and every 16th below
# 32768: with 8 bits an index can make up for that, with fewer it cannot.
FURTHEST_ZERO = {2: 2040.0, 4: 2040.0, 5: 2040.0, 8: 32752.0}


class Encoded(NamedTuple):
    """`packed` uint32 (..., dim * bits / 32). `scales` fp16: (..., dim / 32) of values; of keys (..., 2 * dim / 32), scales before zero points."""

    packed: mx.array
    scales: mx.array


def check_dim(dim: int) -> None:
    """Raise ValueError for a head dimension without a format. mlx's Hadamard transform of some other sizes writes past its buffers on a CPU."""
    if reason := codebooks.unfit(dim):
        raise ValueError(reason)


def encode_keys(keys: mx.array, bits: int) -> Encoded:
    """Keys (..., dim) in `bits` of 2, 4, 5 or 8."""
    check_dim(keys.shape[-1])
    groups = _grouped(keys)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    first, last = _index_range(bits)
    # The key that index 0 stands for, when the zero point is no integer yet.
    origin = (high + low) / 2 if bits == 8 else low
    furthest = mx.maximum(mx.abs(low), mx.abs(high))
    step = mx.maximum((high - low) / (last - first), furthest / FURTHEST_ZERO[bits])
    scale = _to_half(mx.maximum(step, SMALLEST))
    zero = _to_half(mx.round(origin / scale))
    index = mx.clip(mx.round(groups / scale - zero), first, last)
    constant, flat = low == high, _constant(low, last)
    scale, zero, index = (mx.where(constant, one, other) for one, other in zip(flat, (scale, zero, index), strict=True))
    unsigned = (index + offset(bits)).astype(mx.uint32).reshape(keys.shape)
    return Encoded(pack(unsigned, bits), mx.concatenate([scale[..., 0], zero[..., 0]], axis=-1).astype(mx.float16))


def decode_keys(encoded: Encoded, bits: int) -> mx.array:
    """Keys (..., dim) in fp32."""
    scale, zero = key_scales(encoded)
    index = _grouped(unpack(encoded.packed, bits)) - offset(bits)
    return _whole((index + zero[..., None]) * scale[..., None])


def key_scales(encoded: Encoded) -> tuple[mx.array, mx.array]:
    """Scales and zero points (..., dim / 32) in fp32."""
    scale, zero = mx.split(encoded.scales.astype(mx.float32), 2, axis=-1)
    return scale, zero


def key_biases(scale: mx.array, zero: mx.array, bits: int) -> mx.array:
    """What mlx adds to packed index times scale."""
    return (zero - offset(bits)) * scale


def offset(bits: int) -> int:
    """What was added to an index before it was packed."""
    return 128 if bits == 8 else 0


def encode_values(values: mx.array, bits: int) -> Encoded:
    """Values (..., dim) in `bits` of 2, 3, 4, 5 or 8."""
    check_dim(values.shape[-1])
    groups = _grouped(rotate(values))
    scale = _to_half(mx.sqrt(_sum(groups * groups) / GROUP))
    normal = mx.where(scale > 0, groups / mx.where(scale > 0, scale, 1), 0)
    return Encoded(pack(_nearest(normal, bits).reshape(values.shape), bits), scale[..., 0].astype(mx.float16))


def decode_rotated(encoded: Encoded, bits: int) -> mx.array:
    """Values (..., dim) in fp32, still rotated."""
    found = mx.take(_book(bits), unpack(encoded.packed, bits).astype(mx.uint32))
    return _whole(_grouped(found) * encoded.scales.astype(mx.float32)[..., None])


def decode_values(encoded: Encoded, bits: int) -> mx.array:
    """Values (..., dim) in fp32."""
    return unrotate(decode_rotated(encoded, bits))


def rotate(values: mx.array) -> mx.array:
    """``H(signs * v) / sqrt(dim)`` along the last axis, in fp32."""
    dim = values.shape[-1]
    check_dim(dim)
    return mx.hadamard_transform(values.astype(mx.float32) * _signs(dim), scale=1 / math.sqrt(dim))


def unrotate(rotated: mx.array) -> mx.array:
    """The inverse of `rotate`; H is symmetric for powers of two."""
    dim = rotated.shape[-1]
    check_dim(dim)
    return mx.hadamard_transform(rotated.astype(mx.float32), scale=1 / math.sqrt(dim)) * _signs(dim)


def _grouped(array: mx.array) -> mx.array:
    return array.astype(mx.float32).reshape(*array.shape[:-1], -1, GROUP)


def _whole(groups: mx.array) -> mx.array:
    return groups.reshape(*groups.shape[:-2], -1)


def _index_range(bits: int) -> tuple[int, int]:
    return (-127, 127) if bits == 8 else (0, (1 << bits) - 1)


def _to_half(array: mx.array) -> mx.array:
    """Rounded to fp16, the largest of which stands for anything larger; in fp32."""
    return mx.clip(array, -LARGEST, LARGEST).astype(mx.float16).astype(mx.float32)


def _constant(value: mx.array, last: int) -> tuple[mx.array, mx.array, mx.array]:
    """Scale, zero point and index of a group that is one number: exact for what fp16 has, to fp32's last bits for all else."""
    half = _to_half(value) + 0.0  # no negative zero
    exact = half == value
    scale = _to_half(value / last)
    scale = mx.where(scale == 0, SMALLEST, scale)
    # With the highest index the zero point is the little that the scale's rounding has left.
    rest = _to_half(value / scale - last)
    return mx.where(exact, half, scale), mx.where(exact, 1, rest), mx.where(exact, 0, last)


def _sum(groups: mx.array) -> mx.array:
    """Sums over the last axis in a fixed order: halves onto halves."""
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups


def _nearest(normal: mx.array, bits: int) -> mx.array:
    """The places of the nearest centroids, by halving; a boundary itself belongs to the lower one."""
    edges = bounds(bits)
    place = mx.zeros(normal.shape, mx.uint32)
    step = 1 << (bits - 1)
    while step:
        place = place + step * (normal > mx.take(edges, place + (step - 1))).astype(mx.uint32)
        step //= 2
    return place


@cache
def _book(bits: int) -> mx.array:
    return _ready(codebooks.code_book(bits))


@cache
def bounds(bits: int) -> mx.array:
    """Between the centroids, rising."""
    book = codebooks.code_book(bits)
    return _ready([(a + b) / 2 for a, b in itertools.pairwise(book)])


@cache
def _signs(dim: int) -> mx.array:
    return _ready(codebooks.signs(dim))


def _ready(numbers: list[float]) -> mx.array:
    """An array for every thread: only an evaluated one is."""
    made = mx.array(numbers, mx.float32)
    mx.eval(made)
    return made
