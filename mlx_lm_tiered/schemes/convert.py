"""From full precision to a scheme: the one place where plain caches become quantized ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from .caches import BatchQuantizedKVCache, BatchRotatingQuantizedKVCache, Quantized, QuantizedKVCache, RotatingQuantizedKVCache
from .mixed import Group, MixedBatch, groups_of, rows_of
from .spec import Affine

SINGLE: dict[type, type] = {KVCache: QuantizedKVCache, RotatingKVCache: RotatingQuantizedKVCache}
BATCH: dict[type, type] = {BatchKVCache: BatchQuantizedKVCache, BatchRotatingKVCache: BatchRotatingQuantizedKVCache}


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, nested ones in place of their lists."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def mapped(cache: Any, change: Callable[[Any], Any]) -> Any:
    """A cache with its leaves changed, in place where it is a list."""
    if isinstance(cache, CacheList):
        cache.caches = tuple(mapped(inner, change) for inner in cache.caches)
        return cache
    return change(cache)


def fresh(cache: Any, affine: Affine) -> Any:
    """The quantized form of an empty cache; caches without one are returned as they are."""

    def change(leaf: Any) -> Any:
        if type(leaf) is KVCache:
            return QuantizedKVCache(bits=affine.bits, group_size=affine.group_size)
        if type(leaf) is RotatingKVCache:
            return RotatingQuantizedKVCache(leaf.max_size, leaf.keep, bits=affine.bits, group_size=affine.group_size)
        return leaf

    return mapped(cache, change)


def fits(cache: Any, affine: Affine) -> bool:
    """Whether a cache that holds tokens can be quantized: its head dimensions are whole groups."""
    return cache.keys is not None and not any(side.shape[3] % affine.group_size for side in (cache.keys, cache.values))


def convert(caches: Sequence[Any], affine: Affine, start: int) -> int:
    """Quantize one request's plain caches that hold `start` tokens or more; how many.

    The objects stay the same ones, under another class: whoever holds them, in a
    slice of the list for instance, sees the change. One layer is computed and its
    source freed before the next.
    """
    done = 0
    for cache in leaves(caches):
        target = SINGLE.get(type(cache))
        if target is None or cache.offset < max(1, start) or not fits(cache, affine):
            continue
        quantized = _quantized(cache, target, affine)
        quantized.minimum_reusable_offset = cache.offset
        cache.__class__ = target
        cache.__dict__ = quantized.__dict__
        mx.eval(cache.keys, cache.values)
        done += 1
    return done


def convert_rows(caches: list[Any], rows: Sequence[int], affine: Affine) -> None:
    """Quantize rows of a batch's caches, in the list. One layer at a time."""

    def change(cache: Any) -> Any:
        changed = _convert_rows(cache, rows, affine)
        if changed is not cache:
            mx.eval(changed.state)
        return changed

    for place in range(len(caches)):
        caches[place] = mapped(caches[place], change)


def _convert_rows(cache: Any, rows: Sequence[int], affine: Affine) -> Any:
    if type(cache) not in BATCH and not isinstance(cache, MixedBatch):
        return cache
    groups = groups_of(cache)
    plain = next((group for group in groups if type(group.cache) in BATCH), None)
    if plain is None or not fits(plain.cache, affine):
        return cache
    moving = [place for place, row in enumerate(plain.rows) if row in rows]
    staying = [place for place, row in enumerate(plain.rows) if row not in rows]
    if not moving:
        return cache
    _in_order(groups)
    moved = _quantized(_pick(plain.cache, moving), BATCH[type(plain.cache)], affine)
    moved.bounds = moved.offset.tolist()
    result = [Group([plain.rows[place] for place in moving], moved)]
    if staying:
        result.append(Group([plain.rows[place] for place in staying], _pick(plain.cache, staying)))
    for group in groups:
        if group is not plain:
            group.cache.extend(moved)
            result[0] = Group(group.rows + result[0].rows, group.cache)
    if len(result) == 1 and result[0].rows == list(range(rows_of(cache))):
        return result[0].cache
    return MixedBatch(result)


def _in_order(groups: Sequence[Group]) -> None:
    """Put wrapped rings in order. mlx-lm's mask of a longer chunk after a wrapped ring's single token is wrong for padded rows; the chunk that ends at a start may be a single token."""
    for group in groups:
        for part in getattr(group.cache, "parts", (group.cache,)):
            if getattr(part, "rotated", False):
                part._temporal_order()


def _pick(cache: Any, places: list[int]) -> Any:
    """Some rows of a plain batch, with its geometry as it is."""
    if places == list(range(cache.left_padding.shape[0])):
        return cache
    picked = copy.copy(cache)
    for name in ("keys", "values", "offset", "left_padding"):
        setattr(picked, name, getattr(cache, name)[mx.array(places)])
    return picked


def _quantized(cache: Any, target: type, affine: Affine) -> Quantized:
    """A plain cache's contents, slot for slot, in the quantized class; its position and fields are the same."""
    sides = [mx.quantize(side, group_size=affine.group_size, bits=affine.bits) for side in (cache.keys, cache.values)]
    parts = []
    for keys, values in zip(*sides, strict=True):
        part = copy.copy(cache)
        part.keys, part.values = keys, values
        if hasattr(cache, "left_padding"):
            # mlx-lm adds to these in place, in each part.
            part.offset, part.left_padding = cache.offset[...], cache.left_padding[...]
        parts.append(part)
    return target.of(parts, affine.bits, affine.group_size)
