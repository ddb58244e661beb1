"""A batch in which some rows are quantized and others not yet, as between rows of different ages under a scheme with a start.

Each group of rows is a batch of its own; both keep the same geometry (position, ring
state), so that one mask fits both, whichever layer made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, _BaseCache

from .lockstep import Lockstep


@dataclass
class Group:
    """Row numbers of the whole batch, in the order of `cache`'s rows."""

    rows: list[int]
    cache: Any


@dataclass
class Rows:
    """Keys and values of groups of rows, as `MixedBatch` hands them to attention."""

    groups: list[tuple[list[int], Any, Any]]
    bits: int = 0
    group_size: int = 0  # of no group in particular: their presence says that this is not a plain array

    def attend(self, quantized: Callable[..., mx.array], queries: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array:
        """Attention of each group over its own keys, with the rows in their places again."""
        outputs = []
        for rows, keys, values in self.groups:
            picked = mx.array(rows)
            q = queries[picked]
            per_row = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1
            m = mask[picked] if per_row else mask
            if isinstance(keys, mx.array):
                outputs.append(mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=m, sinks=sinks))
            else:
                outputs.append(quantized(q, keys, values, scale, m, keys.group_size, keys.bits, sinks))
        return _in_place(outputs, [rows for rows, _, _ in self.groups])


def _in_place(arrays: list[mx.array], rows: Sequence[list[int]]) -> mx.array:
    order = [row for group in rows for row in group]
    whole = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
    if order == list(range(len(order))):
        return whole
    places = [0] * len(order)
    for place, row in enumerate(order):
        places[row] = place
    return whole[mx.array(places)]


class MixedBatch(_BaseCache):
    """The batch form of plain and quantized rows of one layer. `bits` says to mlx-lm that its attention is not the plain one."""

    def __init__(self, groups: list[Group]):
        self.groups = groups
        self.bits, self.group_size = next((g.cache.bits, g.cache.group_size) for g in groups if isinstance(g.cache, Lockstep))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        fetched = []
        for group in self.groups:
            picked = mx.array(group.rows)
            fetched.append((group.rows, *group.cache.update_and_fetch(keys[picked], values[picked])))
        rows = Rows(fetched)
        return rows, rows

    def keys_and_values(self) -> tuple[Rows, Rows]:
        rows = Rows([(group.rows, *group.cache.keys_and_values()) for group in self.groups])
        return rows, rows

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._of_rows([group.cache.make_mask(*args, **kwargs) for group in self.groups])

    @property
    def offset(self) -> mx.array:
        return self._of_rows([group.cache.offset for group in self.groups])

    @property
    def left_padding(self) -> mx.array:
        return self._of_rows([group.cache.left_padding for group in self.groups])

    def _of_rows(self, arrays: list[mx.array]) -> mx.array:
        return _in_place(arrays, [group.rows for group in self.groups])

    def prepare(self, **options: Any) -> None:
        for group in self.groups:
            group.cache.prepare(**{name: value and [value[row] for row in group.rows] for name, value in options.items()})

    def finalize(self) -> None:
        for group in self.groups:
            group.cache.finalize()

    def _temporal_order(self) -> None:
        """As mlx-lm's: put rings in order."""
        for group in self.groups:
            if hasattr(group.cache, "_temporal_order"):
                group.cache._temporal_order()

    def filter(self, batch_indices: Any) -> None:
        keep: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        left = []
        for group in self.groups:
            places = [place for place, row in enumerate(keep) if row in group.rows]
            if places:
                group.cache.filter([group.rows.index(keep[place]) for place in places])
                left.append(Group(places, group.cache))
        self.groups = left
        align([group.cache for group in left])

    def extract(self, idx: int) -> Any:
        group = next(group for group in self.groups if idx in group.rows)
        return group.cache.extract(group.rows.index(idx))

    @property
    def state(self) -> Any:
        return [group.cache.state for group in self.groups]

    def is_trimmable(self) -> bool:
        return all(group.cache.is_trimmable() for group in self.groups)

    def trim(self, n: int) -> int:
        return [group.cache.trim(n) for group in self.groups][0]

    def size(self) -> int:
        return max(group.cache.size() for group in self.groups)

    def empty(self) -> bool:
        return all(group.cache.empty() for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.cache.nbytes for group in self.groups)


def rows_of(cache: Any) -> int:
    return sum(len(group.rows) for group in cache.groups) if isinstance(cache, MixedBatch) else cache.left_padding.shape[0]


def extend(cache: Any, other: Any) -> Any:
    """A batch with the rows of `other` behind those of `cache`, both of which are given up."""
    first, second = groups_of(cache), groups_of(other)
    alike = len(first) == len(second) == 1 and type(first[0].cache) is type(second[0].cache)
    if alike and not isinstance(cache, MixedBatch) and not isinstance(other, MixedBatch):
        cache.extend(other)
        return cache
    align([group.cache for group in (*first, *second)])
    count = rows_of(cache)
    for group in second:
        rows = [count + row for row in group.rows]
        like = next((g for g in first if type(g.cache) is type(group.cache)), None)
        if like is None:
            first.append(Group(rows, group.cache))
        else:
            like.cache.extend(group.cache)
            like.rows = like.rows + rows
    # One of which the quantized rows have left is still one, and stays the object that it is.
    mixed = next((c for c in (cache, other) if isinstance(c, MixedBatch)), None) or MixedBatch(first)
    mixed.groups = first
    return mixed


def groups_of(cache: Any) -> list[Group]:
    return cache.groups if isinstance(cache, MixedBatch) else [Group(list(range(rows_of(cache))), cache)]


def align(caches: Sequence[Any]) -> None:
    """Give batch caches of one layer the same geometry, by padding on the left and putting rings in order, as mlx-lm does when it extends a batch."""
    parts = [part for cache in caches for part in getattr(cache, "parts", (cache,))]
    if len({(part._idx, getattr(part, "_offset", 0), getattr(part, "rotated", False)) for part in parts}) == 1:
        return
    shapes = next(_shapes(cache) for cache in caches if cache.keys is not None)
    for part in parts:
        if not isinstance(part, BatchKVCache):
            part._temporal_order()
    last = max(part._idx for part in parts)
    seen = max(getattr(part, "_offset", 0) for part in parts)
    for part in parts:
        _pad(part, last - part._idx, shapes)
        part._idx = last
        if not isinstance(part, BatchKVCache):
            part._offset = seen


def _shapes(cache: Any) -> list[tuple[int, int, mx.Dtype]]:
    """Heads, dimension and type of a cache's keys and values before they are quantized."""
    if isinstance(cache, Lockstep):
        return cache.shapes()
    return [(side.shape[1], side.shape[3], side.dtype) for side in (cache.keys, cache.values)]


def _pad(part: Any, left: int, shapes: list[tuple[int, int, mx.Dtype]]) -> None:
    """Put `left` slots before those of a batch; an empty one, which is plain, gets them in the shape of the others'."""
    if part.keys is None:
        rows = part.left_padding.shape[0]
        part.keys, part.values = (mx.zeros((rows, heads, left, dim), dtype) for heads, dim, dtype in shapes)
    elif left or part.keys.shape[2] > part._idx:
        widths = [(0, 0), (0, 0), (left, 0), (0, 0)]
        part.keys, part.values = (mx.pad(side[:, :, : part._idx], widths) for side in (part.keys, part.values))
    part.left_padding = part.left_padding + left
