"""What a layer's tokens look like in blocks: the arrays that they are in, how new ones get there, and what attention is given of them.

Without a KV scheme that are keys and values. A scheme's are what its own cache of one
sequence keeps; it encodes and hands out here as it does there, so numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..kernels.records import Record
from ..schemes.lockstep import Single


class Plane(NamedTuple):
    """One of the arrays, (rows, heads, tokens, width)."""

    name: str
    heads: int
    width: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in it."""
        return self.heads * self.width * self.dtype.size

    @classmethod
    def of(cls, name: str, array: mx.array) -> Self:
        """The one that holds such an array's tokens."""
        return cls(name, array.shape[1], array.shape[3], array.dtype)


@dataclass(frozen=True)
class Sides:
    """Keys and values as the model makes them: their heads, dimensions and types. Blocks hold them as they are."""

    heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype

    @staticmethod
    def of(keys: mx.array, values: mx.array) -> Sides:
        """Those of (rows, heads, tokens, dim). Raises ValueError where keys and values differ in heads."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {keys.shape} and values {values.shape} are not of the same tokens and heads")
        return Sides(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)

    @property
    def computed_bytes(self) -> int:
        """Bytes of a token's keys and values as they are computed."""
        return self.heads * (self.key_dim * self.key_dtype.size + self.value_dim * self.value_dtype.size)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in this layer's blocks."""
        return sum(plane.token_bytes for plane in self.planes)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays that blocks consist of."""
        return Plane("keys", self.heads, self.key_dim, self.key_dtype), Plane("values", self.heads, self.value_dim, self.value_dtype)

    @property
    def tensors(self) -> tuple[Plane, ...]:
        """The same as they are on disk, where all devices have one form."""
        return self.planes

    @property
    def like(self) -> Any:
        """An empty cache of the class that a layer has without paging."""
        return KVCache()

    @property
    def record(self) -> Record | None:
        """What the only plane has, where kernels read records."""
        return None

    @property
    def bits(self) -> int:
        """Tells mlx-lm's attention of keys that are not plain. Raises AttributeError where they are."""
        raise AttributeError("bits")

    @property
    def group_size(self) -> int:
        """As `bits`."""
        raise AttributeError("group_size")

    def holds(self, cache: Any) -> bool:
        """Whether the tokens of a cache without paging can go into these blocks."""
        return type(cache) is KVCache

    def encoded(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        """New tokens (rows, heads, tokens, dim), an array for each plane."""
        return keys, values

    def fetched(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        """Keys and values for attention, of an array of each plane."""
        keys, values = arrays
        return keys, values

    def taken(self, cache: Any, start: int = 0) -> Sequence[mx.array]:
        """An array for each plane of the tokens from `start` on of a cache without paging that `holds` accepts."""
        return [side[:, :, start : cache.offset] for side in (cache.keys, cache.values)]

    def stored(self, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        """An array for each of `tensors`, of one for each plane."""
        return arrays


@dataclass(frozen=True)
class Packed(Sides):
    """Keys and values of a KV scheme. `empty` is a cache of the scheme, which encodes them and hands them to attention; `on_disk` are the `tensors`."""

    empty: Single
    on_disk: tuple[Plane, ...]

    @classmethod
    def of_cache(cls, cache: Single) -> Packed:
        """Those of a cache that holds tokens."""
        keys, values = cache.keys, cache.values
        assert keys is not None and values is not None
        (heads, key_dim, key_dtype), (_, value_dim, value_dtype) = cache.shapes()
        like = type(cache).of([KVCache() for _ in cache.parts], cache.form, cache.record)
        like.adopt(cache)
        tensors = [Plane.of(f"{side}_{name}", array) for side, arrays in (("keys", keys), ("values", values)) for name, array in zip(cache.names, arrays, strict=True)]
        return cls(heads, key_dim, value_dim, key_dtype, value_dtype, like, tuple(tensors))

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        record = self.record
        return self.tensors if record is None else (Plane("records", self.heads, record.words, mx.uint32),)

    @property
    def tensors(self) -> tuple[Plane, ...]:
        return self.on_disk

    @property
    def like(self) -> Single:
        return self.empty

    @property
    def record(self) -> Record | None:
        return self.empty.record

    @property
    def bits(self) -> int:
        return self.empty.bits

    @property
    def group_size(self) -> int:
        return self.empty.group_size

    def holds(self, cache: Any) -> bool:
        return type(cache) is type(self.empty) and cache.form == self.empty.form

    def encoded(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        if self.record is not None:
            return (self.empty.recorded(keys, values),)
        return _flat(self.empty.encode(self.empty.form, keys, values))

    def fetched(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        if self.record is not None:
            (records,) = arrays
            return self.empty.held(records, records.shape[2])
        half = len(arrays) // 2
        return self.empty.keys_of(arrays[:half]), self.empty.values_of(arrays[half:])

    def taken(self, cache: Any, start: int = 0) -> Sequence[mx.array]:
        planes = [tuple(side[:, :, start : cache.offset] for side in pair) for pair in zip(cache.keys, cache.values, strict=True)]
        return _flat(planes) if self.record is None else (self.record.join(planes),)

    def stored(self, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        return arrays if self.record is None else _flat(self.record.split(arrays[0]))


def sides_of(cache: Any) -> Sides | None:
    """Those of a cache that holds tokens; None where it is not one of full attention."""
    if type(cache) is KVCache and cache.keys is not None:
        return Sides.of(cache.keys, cache.values)
    if isinstance(cache, Single) and cache.inner is KVCache and not cache.empty():
        return Packed.of_cache(cache)
    return None


def _flat(planes: Sequence[tuple[mx.array, mx.array]]) -> list[mx.array]:
    """Those of keys, then those of values."""
    return [array for side in zip(*planes, strict=True) for array in side]
