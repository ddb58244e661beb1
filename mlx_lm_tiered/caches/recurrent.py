"""States that cannot go back: ArraysCache and deepseek_v41's LayerCache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .kind import Dump, Kind, Tensor, share, total_nbytes
from .untrusted import INDICES, Reader


class ArraysKind(Kind):
    """ArraysCache: slots of any shape, each an array with the rows first, or None. It does not count tokens."""

    name = "arrays"
    class_name = "mlx_lm.models.cache.ArraysCache"
    _masks = ("left_padding", "lengths")

    def signature(self, cache: Any) -> str:
        return "ssm"

    def empty(self, cache: Any) -> bool:
        return all(slot is None for slot in cache.cache)

    def length(self, cache: Any) -> int | None:
        return None

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.empty(cache)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(len(cache.cache))
        lent.cache = [share(slot) for slot in cache.cache]
        # Upstream subtracts from these in place.
        lent.left_padding, lent.lengths = share(cache.left_padding), share(cache.lengths)
        return lent

    def dump(self, cache: Any) -> Dump:
        tensors = {f"slot{i}": Tensor(slot) for i, slot in enumerate(cache.cache) if slot is not None}
        for name in self._masks:
            if getattr(cache, name) is not None:
                tensors[name] = Tensor(getattr(cache, name))
        return Dump({"slots": [slot is not None for slot in cache.cache]}, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        filled = reader.flags("slots")
        cache = self.cache_class()(len(filled))
        cache.cache = [reader.array(f"slot{i}") if full else None for i, full in enumerate(filled)]
        for name in self._masks:
            setattr(cache, name, reader.optional_array(name, 1, INDICES))
        reader.end()
        rows = {a.shape[0] for a in [*cache.cache, cache.left_padding, cache.lengths] if a is not None}
        if len(rows) > 1 or 0 in rows:
            raise reader.fault("its arrays have different numbers of rows, or none")
        return cache

    def nbytes(self, cache: Any) -> int:
        return total_nbytes([*cache.cache, cache.left_padding, cache.lengths])

    def row(self, cache: Any) -> Any | None:
        row = type(cache)(len(cache.cache))
        if self.empty(cache):
            row.left_padding = mx.array([0])
            return row
        if any(slot is None or slot.shape[0] != 1 for slot in cache.cache):
            return None
        # As upstream's merge: masks of an earlier batch are not taken over.
        row.cache = list(cache.cache)
        return row


class LayerKind(Kind):
    """deepseek_v41's LayerCache: a window, closed groups and the open group, arrays (batch, rows, dim)."""

    name = "deepseek-v41-layer"
    class_name = "mlx_lm.models.deepseek_v41.LayerCache"
    _arrays = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

    def signature(self, cache: Any) -> str:
        return "deepseek-v41"

    def empty(self, cache: Any) -> bool:
        return cache.offset == 0

    def length(self, cache: Any) -> int | None:
        return cache.offset or None

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.empty(cache) or n == cache.offset

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache)(cache.window_size)
        lent.offset = cache.offset
        for name in self._arrays:
            setattr(lent, name, share(getattr(cache, name)))
        return lent

    def dump(self, cache: Any) -> Dump:
        held = {name: getattr(cache, name) for name in self._arrays}
        tensors = {name: Tensor(array) for name, array in held.items() if array is not None}
        return Dump({"offset": cache.offset, "window_size": cache.window_size}, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        offset, window_size = reader.integer("offset"), reader.integer("window_size", 1)
        held = {name: reader.optional_array(name, 3) for name in self._arrays}
        reader.end()
        present = [array for array in held.values() if array is not None]
        if len({array.shape[0] for array in present}) > 1 or any(array.shape[0] == 0 for array in present):
            raise reader.fault("its arrays have different numbers of rows, or none")
        window = 0 if held["window"] is None else held["window"].shape[1]
        if window != min(offset, window_size) or (offset == 0 and present):
            raise reader.fault(f"a window of {window} rows contradicts {offset} tokens")
        cache = self.cache_class()(window_size)
        cache.offset = offset
        for name, array in held.items():
            setattr(cache, name, array)
        return cache

    def nbytes(self, cache: Any) -> int:
        return total_nbytes(getattr(cache, name) for name in self._arrays)
