"""Quantized KV caches: each is three of mlx-lm's own caches in lockstep, one for packed values, one for scales, one for biases.

Groups run along the head dimension, so whatever a cache does along its token axis
(grow, wrap, roll, pad, drop a row) it can do to the three arrays alike. So rings, left
padding, masks, merging and leaving behave as mlx-lm's do, because they are mlx-lm's.
Its own QuantizedKVCache has neither a batch form nor a ring, and allocates wrong widths
for 5 and 6 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache, _BaseCache

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


def _of_first(name: str) -> property:
    return property(lambda self: getattr(self.parts[0], name))


def _attribute(name: str, copied: Callable[[Any], Any] = int) -> property:
    """Another name for an attribute, of which each reader gets a copy."""
    return property(lambda self: copied(getattr(self, name)), lambda self, value: setattr(self, name, copied(value)))


def _apart(part: Any) -> Any:
    """One of mlx-lm's caches over the same buffers, with handles of its own: mlx copies a buffer with two before it writes."""
    made = copy.copy(part)
    made.__dict__ = {name: value[...] if isinstance(value, mx.array) else value for name, value in vars(part).items()}
    return made


class Quantized(_BaseCache):
    """What all forms share. `bits` and `group_size` tell mlx-lm's attention how to read what `update_and_fetch` returns."""

    inner: ClassVar[type]
    _converted: property  # at which token the sequence was quantized, or each of them

    def __init__(self, *arguments: Any, bits: int, group_size: int):
        self._set(tuple(self.inner(*arguments) for _ in PARTS), bits, group_size)

    @classmethod
    def of(cls, parts: Iterable[Any], bits: int, group_size: int) -> Self:
        """A cache over three inner caches, which the caller gives up."""
        made = cls.__new__(cls)
        made._set(tuple(parts), bits, group_size)
        return made

    def _set(self, parts: tuple[Any, ...], bits: int, group_size: int) -> None:
        self.parts, self.bits, self.group_size = parts, bits, group_size

    @property
    def keys(self) -> tuple[mx.array, ...] | None:
        return None if self.parts[0].keys is None else tuple(part.keys for part in self.parts)

    @property
    def values(self) -> tuple[mx.array, ...] | None:
        return None if self.parts[0].values is None else tuple(part.values for part in self.parts)

    offset = _of_first("offset")

    def _triples(self, fetched: list[tuple[mx.array, mx.array]]) -> tuple[Triple, Triple]:
        keys, values = zip(*fetched, strict=True)
        return Triple.of(keys, self.bits, self.group_size), Triple.of(values, self.bits, self.group_size)

    def quantize(self, array: mx.array) -> list[mx.array]:
        return mx.quantize(array, group_size=self.group_size, bits=self.bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Quantize and append; keys and values of all held tokens."""
        new = zip(self.parts, self.quantize(keys), self.quantize(values), strict=True)
        return self._triples([part.update_and_fetch(k, v) for part, k, v in new])

    def keys_and_values(self) -> tuple[Triple, Triple]:
        return self._triples([part.keys_and_values() for part in self.parts])

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts[0].make_mask(*args, **kwargs)

    @property
    def state(self) -> Any:
        return [part.state for part in self.parts], self.bits, self.group_size, self._converted

    @state.setter
    def state(self, value: Any) -> None:
        states, bits, group_size, converted = value
        self._set(tuple(self.inner.from_state(state) for state in states), bits, group_size)
        self._converted = converted

    def __copy__(self) -> Self:
        """A cache of its own: as little as a lent one does a copy change what it was made from."""
        made = self.of([_apart(part) for part in self.parts], self.bits, self.group_size)
        made._converted = self._converted
        return made

    def is_trimmable(self) -> bool:
        return self.parts[0].is_trimmable()

    def trim(self, n: int) -> int:
        return [part.trim(n) for part in self.parts][0]

    def size(self) -> int:
        return self.parts[0].size()

    def empty(self) -> bool:
        return self.parts[0].empty()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class _Single(Quantized):
    """One sequence's. `minimum_reusable_offset`: the token at which it was quantized; earlier ones attended to full precision."""

    batch: ClassVar[type[_Batch]]
    minimum_reusable_offset: int
    _converted = _attribute("minimum_reusable_offset")

    def _set(self, parts: tuple[Any, ...], bits: int, group_size: int) -> None:
        super()._set(parts, bits, group_size)
        self.minimum_reusable_offset = 0

    @classmethod
    def merge(cls, caches: Sequence[_Single]) -> _Batch:
        """The batch of single caches, which are copied, as mlx-lm's merge does. Empty ones keep the scheme."""
        if len({(cache.bits, cache.group_size) for cache in caches}) > 1:
            raise ValueError("caches of different schemes cannot be merged")
        parts = [cls.inner.merge(list(column)) for column in zip(*(cache.parts for cache in caches), strict=True)]
        merged = cls.batch.of(parts, caches[0].bits, caches[0].group_size)
        merged.bounds = [cache.minimum_reusable_offset for cache in caches]
        return merged


class QuantizedKVCache(_Single):
    """Every token."""

    inner = KVCache


class RotatingQuantizedKVCache(_Single):
    """A ring of the last `max_size` tokens behind the first `keep`."""

    inner = RotatingKVCache
    max_size, keep, _idx = _of_first("max_size"), _of_first("keep"), _of_first("_idx")


class _Batch(Quantized):
    """Rows of different lengths, padded on the left. `bounds` has each row's `minimum_reusable_offset`."""

    single: ClassVar[type[_Single]]
    bounds: list[int]
    _converted = _attribute("bounds", list)
    left_padding, _idx = _of_first("left_padding"), _of_first("_idx")

    def _set(self, parts: tuple[Any, ...], bits: int, group_size: int) -> None:
        super()._set(parts, bits, group_size)
        self.bounds = [0] * self.left_padding.shape[0]

    def prepare(self, **kwargs: Any) -> None:
        self._each(lambda part: part.prepare(**kwargs))

    def finalize(self) -> None:
        self._each(lambda part: part.finalize())

    def filter(self, batch_indices: Any) -> None:
        rows = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        self._each(lambda part: part.filter(batch_indices))
        self.bounds = [self.bounds[row] for row in rows]

    def extend(self, other: Self) -> None:
        if (self.bits, self.group_size) != (other.bits, other.group_size):
            raise ValueError("caches of different schemes cannot be merged")
        for part, more in zip(self.parts, other.parts, strict=True):
            part.extend(more)
        self.bounds = self.bounds + other.bounds

    def extract(self, idx: int) -> _Single:
        row = self.single.of([part.extract(idx) for part in self.parts], self.bits, self.group_size)
        row.minimum_reusable_offset = self.bounds[idx]
        return row

    def _each(self, act: Callable[[Any], Any]) -> None:
        for part in self.parts:
            act(part)


class BatchQuantizedKVCache(_Batch):
    """The batch form of `QuantizedKVCache`."""

    inner, single = BatchKVCache, QuantizedKVCache


class BatchRotatingQuantizedKVCache(_Batch):
    """The batch form of `RotatingQuantizedKVCache`. As in mlx-lm, rows lose their `keep`."""

    inner, single = BatchRotatingKVCache, RotatingQuantizedKVCache
    max_size, rotated, _offset = _of_first("max_size"), _of_first("rotated"), _of_first("_offset")

    def _temporal_order(self) -> None:
        """As mlx-lm's: put the ring in order."""
        self._each(lambda part: part._temporal_order())


QuantizedKVCache.batch = BatchQuantizedKVCache
RotatingQuantizedKVCache.batch = BatchRotatingQuantizedKVCache
