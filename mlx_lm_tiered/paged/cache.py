"""One sequence's cache of one layer, over the blocks of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from ..caches.kind import Later
from .table import Storage, Table


class PagedKVCache(_BaseCache):
    """Stands for mlx-lm's KVCache, number for number; `layer` is its place among the paged layers.

    Where its blocks are one ascending run, attention gets views of the arena, as it
    gets views of a plain cache's buffers; otherwise copies.
    """

    def __init__(self, table: Table, layer: int):
        self.table, self.layer = table, layer
        if table.lengths[layer] is None:
            table.lengths[layer] = 0

    @property
    def storage(self) -> Storage:
        return self.table.storage

    @property
    def offset(self) -> int:
        return self.table.length(self.layer)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens (1, heads, tokens, dim); keys and values of all. Raises PoolExhausted, and ValueError for more than one sequence."""
        if keys.shape[0] != 1:
            raise ValueError(f"a paged cache holds one sequence, and got {keys.shape[0]}")
        append(self.table, self.layer, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What all its tokens have; without a copy where its blocks are one run."""
        return read(self.table, self.layer)

    def alone(self, most: int | None = None) -> tuple[mx.array, mx.array, int] | None:
        """Keys and values of its newest `most` tokens, or of all, and how many those are; None where there is none. They may be views: let them go before the next write."""
        return newest(self.table, self.layer, most)

    @property
    def keys(self) -> mx.array | None:
        return self.keys_and_values()[0] if self.offset else None

    @property
    def values(self) -> mx.array | None:
        return self.keys_and_values()[1] if self.offset else None

    def size(self) -> int:
        return self.offset

    @property
    def state(self) -> Any:
        """The layer's whole arenas, to be evaluated; keep nothing of it."""
        arenas = self.storage.arenas
        return [side for side in (arenas.keys[self.layer], arenas.values[self.layer]) if side is not None]

    @state.setter
    def state(self, value: Any) -> None:
        raise ValueError("a paged cache has no state of its own to be set")

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        return self.table.trim(self.layer, n)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def lent(self, n: int | None = None, key: object = None) -> PagedKVCache:
        """A cache that shares the blocks of the first `n` tokens, or of all; see `Table.fork`."""
        return PagedKVCache(self.table.fork(self.layer, self.offset if n is None else n, key), self.layer)

    def later(self, side: str) -> Later:
        """Its keys or values as they will be read out of the blocks, which must not be written to until then."""
        sides, tokens = self.storage.arenas.layers[self.layer], self.offset
        dim, dtype = (sides.key_dim, sides.key_dtype) if side == "keys" else (sides.value_dim, sides.value_dtype)

        def make() -> mx.array:
            # Several runs are a copy already; a view must not outlive this call.
            array = self.storage.arenas.copied(self.layer, side, self.table.slots(0, tokens))
            mx.eval(array)
            return array

        return Later((1, sides.heads, tokens, dim), dtype, make)

    def __copy__(self) -> PagedKVCache:
        return self.lent()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        return self.lent(key=id(memo))

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> Any:
        """The batch of caches, which are given up: rows are their tables."""
        from .batch import BatchPagedKVCache

        return BatchPagedKVCache([cache.table for cache in caches], caches[0].layer)

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks in this layer, shared ones included."""
        return len(self.table.blocks) * self.storage.arenas.layer_bytes(self.layer)


def append(table: Table, layer: int, keys: mx.array, values: mx.array) -> None:
    """Put tokens (1, heads, tokens, dim) behind a layer's. Raises PoolExhausted and ValueError; then the layer has what it had."""
    start = table.extend(layer, keys.shape[2])
    try:
        table.storage.arenas.write(layer, table.slots(start, table.length(layer)), keys, values)
    except ValueError:
        table.trim(layer, keys.shape[2])
        raise


def read(table: Table, layer: int) -> tuple[mx.array, mx.array]:
    """Keys and values of all of a layer's tokens, (1, heads, tokens, dim)."""
    return table.storage.arenas.read(layer, table.slots(0, table.length(layer)))


def newest(table: Table, layer: int, most: int | None) -> tuple[mx.array, mx.array, int] | None:
    """The same of the newest `most` tokens, and how many those are; None where there is none."""
    length = table.length(layer)
    count = length if most is None else min(most, length)
    return (*table.storage.arenas.read(layer, table.slots(length - count, length)), count) if count else None
