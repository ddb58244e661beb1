"""Batches of rows: BatchKVCache and BatchRotatingKVCache.

Their rows differ in length, so a batch counts no tokens and is never cut; rows are
extracted and kept as the single forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .attention import TOKEN_AXIS
from .kind import Dump, Kind, Tensor, Trimmed, share, total_nbytes
from .rotating import unwind_ring
from .untrusted import INDICES, Reader


class _Batch(Kind):
    """`keys` and `values` (rows, heads, slots, dim) or None; int arrays (rows,), of which the last may be None."""

    _rows: tuple[str, str, str]

    def empty(self, cache: Any) -> bool:
        return cache.keys is None

    def length(self, cache: Any) -> int | None:
        return None

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.empty(cache)

    def nbytes(self, cache: Any) -> int:
        return total_nbytes((cache.keys, cache.values, *(getattr(cache, name) for name in self._rows)))

    def _share_into(self, lent: Any, cache: Any) -> None:
        # Upstream adds to the row arrays in place.
        for name in ("keys", "values", *self._rows):
            setattr(lent, name, share(getattr(cache, name)))

    def _row_tensors(self, cache: Any) -> dict[str, Tensor]:
        held = {name: getattr(cache, name) for name in self._rows}
        return {name: Tensor(array) for name, array in held.items() if array is not None}

    def _read_into(self, cache: Any, reader: Reader, held: int) -> None:
        *always, sometimes = self._rows
        rows: dict[str, mx.array | None] = {name: reader.array(name, 1, INDICES) for name in always}
        rows[sometimes] = reader.optional_array(sometimes, 1, INDICES)
        if reader.has("keys"):
            cache.keys, cache.values = reader.keys_and_values(held)
        elif held:
            raise reader.fault("tensor keys is missing")
        sizes = {array.shape[0] for array in [*rows.values(), cache.keys] if array is not None}
        if len(sizes) != 1 or 0 in sizes:
            raise reader.fault("its arrays have different numbers of rows, or none")
        for name, array in rows.items():
            setattr(cache, name, array)


class BatchKind(Trimmed, _Batch):
    """BatchKVCache: slots behind `_idx` are slack."""

    name = "batch-kv"
    class_name = "mlx_lm.models.cache.BatchKVCache"
    _rows = ("offset", "left_padding", "_right_padding")

    def signature(self, cache: Any) -> str:
        return "batch:kv:plain"

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)([0])
        self._share_into(lent, cache)
        lent._idx = cache._idx
        return lent

    def dump(self, cache: Any) -> Dump:
        tensors = self._row_tensors(cache)
        if cache.keys is not None:
            tensors["keys"] = Tensor(cache.keys[..., : cache._idx, :], TOKEN_AXIS)
            tensors["values"] = Tensor(cache.values[..., : cache._idx, :], TOKEN_AXIS)
        return Dump({"_idx": cache._idx}, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays, self.elements)
        cache = self.cache_class()([0])
        cache._idx = reader.integer("_idx")
        self._read_into(cache, reader, cache._idx)
        reader.end()
        return cache


class BatchRotatingKind(_Batch):
    """BatchRotatingKVCache: slots behind `_idx` are slack only while nothing was dropped or rotated."""

    name = "batch-kv-rotating"
    class_name = "mlx_lm.models.cache.BatchRotatingKVCache"
    _rows = ("offset", "left_padding", "_lengths")

    def signature(self, cache: Any) -> str:
        return "batch:kv:rotating-plain"

    def order(self, cache: Any) -> None:
        cache._temporal_order()

    def unwinds(self, cache: Any, whole: bool) -> bool:
        return not whole

    def unwind(self, cache: Any, n: int) -> None:
        unwind_ring(cache, n)
        cache._offset -= n

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(cache.max_size, [0])
        self._share_into(lent, cache)
        lent._idx, lent._offset, lent.rotated = cache._idx, cache._offset, cache.rotated
        return lent

    def dump(self, cache: Any) -> Dump:
        fields = {name: getattr(cache, name) for name in ("max_size", "_idx", "_offset", "rotated")}
        tensors = self._row_tensors(cache)
        if cache.keys is not None:
            keys, values = cache.keys, cache.values
            if not cache.rotated and cache._idx == cache._offset:
                keys, values = keys[..., : cache._idx, :], values[..., : cache._idx, :]
            tensors |= {"keys": Tensor(keys), "values": Tensor(values)}
        return Dump(fields, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays, self.elements)
        cache = self.cache_class()(reader.integer("max_size", 1), [0])
        cache._idx, cache._offset = reader.integer("_idx"), reader.integer("_offset")
        cache.rotated = reader.flag("rotated")
        self._read_into(cache, reader, cache._idx)
        reader.end()
        self._check(reader, cache, 0 if cache.keys is None else cache.keys.shape[TOKEN_AXIS])
        return cache

    def _check(self, reader: Reader, cache: Any, capacity: int) -> None:
        """The states upstream reaches: rotated; every token in its place; or full after tokens were dropped."""
        if cache.rotated:
            valid = capacity == cache.max_size <= cache._offset and cache._idx > 0
        elif cache._idx == cache._offset:
            valid = capacity <= cache.max_size or capacity == cache._idx
        else:
            valid = cache.max_size <= capacity == cache._idx < cache._offset
        if not valid:
            raise reader.fault("offset, position and size of the ring contradict each other")
