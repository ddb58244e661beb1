"""From full precision to a scheme: the one place where plain caches become quantized ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from .caches import BatchQuantizedKVCache, BatchRotatingQuantizedKVCache, QuantizedKVCache, RotatingQuantizedKVCache
from .lockstep import Lockstep
from .mixed import Group, MixedBatch, groups_of, rows_of
from .spec import Affine, Form, Turbo
from .turbo import BatchTurboQuantKVCache, TurboQuantKVCache

_SINGLE: dict[type, dict[type, type]] = {
    Affine: {KVCache: QuantizedKVCache, RotatingKVCache: RotatingQuantizedKVCache},
    Turbo: {KVCache: TurboQuantKVCache},
}
_BATCH: dict[type, dict[type, type]] = {
    Affine: {BatchKVCache: BatchQuantizedKVCache, BatchRotatingKVCache: BatchRotatingQuantizedKVCache},
    Turbo: {BatchKVCache: BatchTurboQuantKVCache},
}
# Elements of keys and values that are encoded at once when a cache is converted: TurboQuant takes up to nine times their fp32 beside it.
PIECE = 1 << 21


def target(cache: Any, form: Form) -> type | None:
    """The class that one request's cache has under a form; None where it stays as it is."""
    return _SINGLE[type(form)].get(type(cache))


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


def fresh(cache: Any, form: Form) -> Any:
    """The form of an empty cache; caches that have none are returned as they are."""

    def change(leaf: Any) -> Any:
        found = target(leaf, form)
        return leaf if found is None else found.of([copy.copy(leaf) for _ in found.names], form)  # type: ignore[attr-defined]

    return mapped(cache, change)


def unfit(cache: Any, form: Form) -> str | None:
    """Why a cache that holds tokens cannot be converted, or None."""
    return next((reason for side in (cache.keys, cache.values) if (reason := form.unfit(side.shape[3]))), None)


def _fits(cache: Any, form: Form) -> bool:
    return cache.keys is not None and unfit(cache, form) is None


def convert(caches: Sequence[Any], form: Form, start: int) -> int:
    """Quantize one request's plain caches that hold `start` tokens or more; how many.

    The objects stay the same ones, under another class: whoever holds them, in a
    slice of the list for instance, sees the change. One layer is computed and its
    source freed before the next.
    """
    done = 0
    for cache in leaves(caches):
        found = target(cache, form)
        if found is None or cache.offset < max(1, start) or not _fits(cache, form):
            continue
        quantized = _quantized(cache, found, form)
        quantized.minimum_reusable_offset = cache.offset
        cache.__class__ = found
        cache.__dict__ = quantized.__dict__
        mx.eval(cache.keys, cache.values)
        done += 1
    return done


def convert_rows(caches: list[Any], rows: Sequence[int], form: Form) -> None:
    """Quantize rows of a batch's caches, in the list. One layer at a time."""

    def change(cache: Any) -> Any:
        changed = _convert_rows(cache, rows, form)
        if changed is not cache:
            mx.eval(changed.state)
        return changed

    for place in range(len(caches)):
        caches[place] = mapped(caches[place], change)


def _convert_rows(cache: Any, rows: Sequence[int], form: Form) -> Any:
    targets = _BATCH[type(form)]
    if type(cache) not in targets and not isinstance(cache, MixedBatch):
        return cache
    groups = groups_of(cache)
    plain = next((group for group in groups if type(group.cache) in targets), None)
    if plain is None or not _fits(plain.cache, form):
        return cache
    moving = [place for place, row in enumerate(plain.rows) if row in rows]
    staying = [place for place, row in enumerate(plain.rows) if row not in rows]
    if not moving:
        return cache
    _in_order(groups)
    moved = _quantized(_pick(plain.cache, moving), targets[type(plain.cache)], form)
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


def _quantized(cache: Any, target: type, form: Form) -> Lockstep:
    """A plain cache's contents, slot for slot, in the class of the form; its position and fields are the same."""
    parts = []
    for keys, values in _encoded(cache.keys, cache.values, target, form):
        part = copy.copy(cache)
        part.keys, part.values = keys, values
        if hasattr(cache, "left_padding"):
            # mlx-lm adds to these in place, in each part.
            part.offset, part.left_padding = cache.offset[...], cache.left_padding[...]
        parts.append(part)
    made = target.of(parts, form)  # type: ignore[attr-defined]
    made.adopt(cache)
    return made


def _encoded(keys: mx.array, values: mx.array, target: type, form: Form) -> list[tuple[mx.array, mx.array]]:
    slots = keys.shape[2]
    step = max(1, PIECE * slots // (keys.size + values.size))
    pieces = []
    for at in range(0, slots, step):
        pieces.append(target.encode(form, *(side[:, :, at : at + step] for side in (keys, values))))  # type: ignore[attr-defined]
        mx.eval(pieces[-1])
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*pieces, strict=True)
    return [(mx.concatenate(list(keys), axis=2), mx.concatenate(list(values), axis=2)) for keys, values in (zip(*column, strict=True) for column in columns)]
