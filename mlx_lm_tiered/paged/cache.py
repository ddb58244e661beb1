"""One sequence's cache of one layer, over the blocks of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from ..caches.kind import Later
from .sides import Sides
from .table import Storage, Table


class PagedKVCache(_BaseCache):
    """Stands for mlx-lm's KVCache, or a KV scheme's cache of every token, number for number; `layer` is its place among the paged layers.

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
    def sides(self) -> Sides:
        """What its tokens look like."""
        return self.storage.arenas.layers[self.layer]

    @property
    def offset(self) -> int:
        return self.table.length(self.layer)

    @property
    def bits(self) -> int:
        """As `Sides.bits`: there is no such attribute where keys are plain."""
        return self.sides.bits

    @property
    def group_size(self) -> int:
        """As `bits`."""
        return self.sides.group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens (1, heads, tokens, dim); keys and values of all. Raises PoolExhausted, and ValueError for more than one sequence."""
        if keys.shape[0] != 1:
            raise ValueError(f"a paged cache holds one sequence, and got {keys.shape[0]}")
        append(self.table, self.layer, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What all its tokens have; without a copy where its blocks are one run."""
        return read(self.table, self.layer)

    def alone(self, most: int | None = None) -> tuple[mx.array, mx.array, int] | None:
        """Keys and values of its newest `most` tokens, or of all, and how many those are; None where there is none. They may be views: let them go before the next write."""
        return newest(self.table, self.layer, most)

    @property
    def keys(self) -> Any:
        return self.keys_and_values()[0] if self.offset else None

    @property
    def values(self) -> Any:
        return self.keys_and_values()[1] if self.offset else None

    def size(self) -> int:
        return self.offset

    @property
    def state(self) -> Any:
        """The layer's whole arenas, to be evaluated; keep nothing of it."""
        return list(self.storage.arenas.planes[self.layer])

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

    def later(self, tensor: int) -> Later:
        """One of its `tensors` (see `Sides`) as it will be read out of the blocks, which must not be written to until then."""
        plane, tokens = self.sides.tensors[tensor], self.offset

        def make(start: int) -> mx.array:
            return self.storage.arenas.copied(self.layer, tensor, self.table.slots(start, tokens))

        return Later((1, plane.heads, tokens, plane.width), plane.dtype, make)

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
    append_planes(table, layer, table.storage.arenas.layers[layer].encoded(keys, values))


def append_planes(table: Table, layer: int, arrays: Sequence[mx.array]) -> None:
    """The same of tokens as the blocks hold them, (1, heads, tokens, width) of each plane."""
    tokens = arrays[0].shape[2]
    start = table.extend(layer, tokens)
    try:
        table.storage.arenas.write(layer, table.slots(start, start + tokens), arrays)
    except ValueError:
        table.trim(layer, tokens)
        raise


def read(table: Table, layer: int, start: int = 0) -> tuple[Any, Any]:
    """Keys and values of a layer's tokens, all or those from `start` on, as attention takes them."""
    arenas = table.storage.arenas
    return arenas.layers[layer].fetched(arenas.read(layer, table.slots(start, table.length(layer))))


def newest(table: Table, layer: int, most: int | None) -> tuple[Any, Any, int] | None:
    """The same of the newest `most` tokens, and how many those are; None where there is none."""
    length = table.length(layer)
    count = length if most is None else min(most, length)
    return (*read(table, layer, length - count), count) if count else None
