"""Caches into blocks, and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..caches.kind import kind_of, made
from ..schemes.convert import leaves, mapped
from .cache import PagedKVCache, append_planes
from .table import Storage, Table


def layers_of(caches: Sequence[Any], storage: Storage) -> dict[int, int]:
    """The paged layer of each of a model's caches whose tokens go into its blocks, by the cache's `id`. What comes behind a model's own caches is a draft model's, where mlx-lm drafts."""
    layers = iter(range(len(storage.arenas.layers)))
    places = [(leaf, sides, None if sides is None else next(layers)) for leaf, sides in zip(leaves(caches), storage.sides, strict=False)]
    # A ring is made in place of a plain cache where its size is bounded.
    return {id(leaf): layer for leaf, sides, layer in places if layer is not None and sides is not None and sides.holds(leaf)}


def into_blocks(caches: Sequence[Any], table: Table, shared: int = 0) -> list[Any]:
    """Caches with those of full attention over a table, which has the first `shared` of their tokens already. One layer is copied and its source freed before the next.

    Raises PoolExhausted, and ValueError for tokens that are not the model's.
    """
    layers = layers_of(caches, table.storage)

    def change(leaf: Any) -> Any:
        if id(leaf) not in layers:
            return leaf
        cache = PagedKVCache(table, layers[id(leaf)])
        if leaf.offset:
            table.lengths[cache.layer] = shared
        if leaf.offset > shared:
            append_planes(table, cache.layer, cache.sides.taken(leaf, shared))
            table.storage.arenas.settle(cache.layer)
            vars(leaf).clear()
        return cache

    return [mapped(cache, change) for cache in caches]


def out_of_blocks(caches: Sequence[Any]) -> list[Any]:
    """The same with copies of what is in blocks, in caches as they are without paging."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, PagedKVCache):
            return leaf
        fields, tensors = kind_of(leaf).dump(leaf)
        return kind_of(leaf.sides.like).load(fields, {name: made(tensor.array) for name, tensor in tensors.items()})

    return [mapped(cache, change) for cache in caches]
