"""Quantized KV caches of the affine scheme: three of mlx-lm's caches in lockstep, one for packed values, one for scales, one for biases.

mlx-lm's own QuantizedKVCache has neither a batch form nor a ring, and allocates wrong
widths for 5 and 6 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from .lockstep import Batch, Lockstep, Single, of_first
from .spec import Affine

PARTS = ("packed", "scales", "biases")


class Triple(tuple[mx.array, ...]):
    """Keys or values as (packed, scales, biases), each (rows, heads, slots, width), with what is needed to read them."""

    bits: int
    group_size: int

    @classmethod
    def of(cls, arrays: Iterable[mx.array], bits: int, group_size: int) -> Self:
        made = cls(arrays)
        made.bits, made.group_size = bits, group_size
        return made

    def dequantized(self, where: Any) -> mx.array:
        """What is at that index of the arrays (see `numpy.s_`)."""
        packed, scales, biases = self
        return mx.dequantize(packed[where], scales[where], biases[where], group_size=self.group_size, bits=self.bits)


class Quantized(Lockstep):
    """What all forms of the affine scheme share."""

    names, form_class = PARTS, Affine

    def __init__(self, *arguments: Any, bits: int, group_size: int):
        self._set(tuple(self.inner(*arguments) for _ in PARTS), Affine(bits, group_size))

    @classmethod
    def encoded(cls, form: Affine, keys: mx.array, values: mx.array) -> list[tuple[mx.array, mx.array]]:
        sides = (mx.quantize(side, group_size=form.group_size, bits=form.bits) for side in (keys, values))
        return list(zip(*sides, strict=True))

    def keys_of(self, arrays: Sequence[mx.array]) -> Triple:
        return Triple.of(arrays, self.bits, self.group_size)

    values_of = keys_of

    def shapes(self) -> list[tuple[int, int, mx.Dtype]]:
        assert self.keys is not None and self.values is not None
        return [(scales.shape[1], scales.shape[3] * self.group_size, scales.dtype) for _, scales, _ in (self.keys, self.values)]


class QuantizedKVCache(Quantized, Single):
    """Every token."""

    inner = KVCache


class RotatingQuantizedKVCache(Quantized, Single):
    """A ring of the last `max_size` tokens behind the first `keep`."""

    inner = RotatingKVCache
    max_size, keep, _idx = of_first("max_size"), of_first("keep"), of_first("_idx")


class BatchQuantizedKVCache(Quantized, Batch):
    """The batch form of `QuantizedKVCache`."""

    inner, single = BatchKVCache, QuantizedKVCache


class BatchRotatingQuantizedKVCache(Quantized, Batch):
    """The batch form of `RotatingQuantizedKVCache`. As in mlx-lm, rows lose their `keep`."""

    inner, single = BatchRotatingKVCache, RotatingQuantizedKVCache
    max_size, rotated, _offset = of_first("max_size"), of_first("rotated"), of_first("_offset")

    def _temporal_order(self) -> None:
        """As mlx-lm's: put the ring in order."""
        self._each(lambda part: part._temporal_order())


QuantizedKVCache.batch = BatchQuantizedKVCache
RotatingQuantizedKVCache.batch = BatchRotatingQuantizedKVCache
