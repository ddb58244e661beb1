"""Caches that keep keys and values in more than one array each: as many of mlx-lm's own caches in lockstep, one for each kind of array.

Groups run along the head dimension, so whatever a cache does along its token axis
(grow, wrap, roll, pad, drop a row) it can do to all arrays alike. So rings, left
padding, masks, merging and leaving behave as mlx-lm's do, because they are mlx-lm's.

Where kernels read them, caches that hold every token keep one array of records in
place of all (`kernels/records.py`): one of mlx-lm's caches with the records for keys,
and nothing for values.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, _BaseCache

from ..kernels.records import Planes, Record, record_for, record_in
from .held import Held, HeldRecords
from .spec import Form


def of_first(name: str) -> property:
    """An attribute that the first of the caches has."""
    return property(lambda self: getattr(self.parts[0], name))


def _attribute(name: str, copied: Callable[[Any], Any] = int) -> property:
    """Another name for an attribute, of which each reader gets a copy."""
    return property(lambda self: copied(getattr(self, name)), lambda self, value: setattr(self, name, copied(value)))


def _apart(part: Any) -> Any:
    """One of mlx-lm's caches over the same buffers, with handles of its own: mlx copies a buffer with two before it writes."""
    made = copy.copy(part)
    made.__dict__ = {name: value[...] if isinstance(value, mx.array) else value for name, value in vars(part).items()}
    return made


class Lockstep(_BaseCache):
    """What all share. `bits` and `group_size` tell mlx-lm's attention that what `update_and_fetch` returns is not plain."""

    inner: ClassVar[Any]  # mlx-lm's class
    # Of the arrays of keys, and of values.
    names: ClassVar[tuple[str, ...]]
    form_class: ClassVar[type]
    # Whether those that hold every token keep records, and what makes these, and encodes: None where mlx's own operations are to.
    keeps_records: ClassVar[bool] = False
    encoder: ClassVar[Callable[[mx.array, mx.array, Record], mx.array | None] | None] = None
    parts: tuple[Any, ...]
    form: Any
    record: Record | None  # what the one part holds; None where there is a part for each of `names`
    _converted: property  # at which token the sequence was converted, or each of them

    @classmethod
    def of(cls, parts: Iterable[Any], form: Form, record: Record | None = None) -> Self:
        """A cache over inner caches, which the caller gives up."""
        made = cls.__new__(cls)
        made._set(tuple(parts), form)
        made.record = record
        return made

    def _set(self, parts: tuple[Any, ...], form: Any) -> None:
        self.parts, self.form, self.record = parts, form, None

    @classmethod
    def encode(cls, form: Any, keys: mx.array, values: mx.array) -> Planes:
        """New arrays of keys and values (rows, heads, tokens, width) for each of `names`."""
        record = None if Lockstep.encoder is None else record_for(form.layout, keys, values)
        made = None if record is None else Lockstep.encoder(keys, values, record)  # type: ignore[misc]
        return cls.encoded(form, keys, values) if made is None else record.split(made)  # type: ignore[union-attr]

    @classmethod
    def encoded(cls, form: Any, keys: mx.array, values: mx.array) -> Planes:
        """The same by mlx's own operations."""
        raise NotImplementedError

    def keys_of(self, arrays: Sequence[mx.array]) -> Any:
        """Keys for attention, of an array of each part."""
        raise NotImplementedError

    def values_of(self, arrays: Sequence[mx.array]) -> Any:
        """Values for attention, of an array of each part."""
        raise NotImplementedError

    def fetched(self, arrays: list[tuple[mx.array, mx.array]]) -> tuple[Any, Any]:
        """Keys and values for attention, of the arrays of all parts."""
        keys, values = zip(*arrays, strict=True)
        return self.keys_of(keys), self.values_of(values)

    def shapes(self) -> list[tuple[int, int, mx.Dtype]]:
        """Heads, dimension and type of keys and values before they were encoded."""
        raise NotImplementedError

    def adopt(self, other: Any) -> None:
        """Take over what is not in the parts from a cache, plain or of this class, whose tokens these are."""

    @property
    def bits(self) -> int:
        return self.form.bits

    @property
    def group_size(self) -> int:
        return self.form.group_size

    @property
    def keys(self) -> tuple[mx.array, ...] | None:
        return None if self.parts[0].keys is None else tuple(keys for keys, _ in self._planes())

    @property
    def values(self) -> tuple[mx.array, ...] | None:
        return None if self.parts[0].keys is None else tuple(values for _, values in self._planes())

    def _planes(self) -> Planes:
        """The buffers of each part, or views of the records for them."""
        if self.record is not None:
            return self.record.split(self.parts[0].keys)
        return [(part.keys, part.values) for part in self.parts]

    offset = of_first("offset")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Encode and append; keys and values of all held tokens."""
        if Lockstep.keeps_records and self.record is None:
            self.keep_records(keys, values)
        if self.record is not None:
            return self._append(self.recorded(keys, values))
        new = self.encode(self.form, keys, values)
        return self.fetched([part.update_and_fetch(k, v) for part, (k, v) in zip(self.parts, new, strict=True)])

    def keys_and_values(self) -> tuple[Any, Any]:
        if self.record is not None:
            return self.held(self.parts[0].keys, self._filled())
        return self.fetched([part.keys_and_values() for part in self.parts])

    def keep_records(self, keys: mx.array | None = None, values: mx.array | None = None) -> None:
        """Put what is held, or else what comes, in records, where it can be."""
        one = self.parts[0]
        if self.record is not None or self.inner not in (KVCache, BatchKVCache):
            return
        if one.keys is not None:
            planes = self._planes()
            self.record = record_in(self.form.layout, planes)
            if self.record is not None:
                one.keys = self.record.join(planes)
                one.values = _nothing(one.keys)
        elif keys is not None and values is not None:
            self.record = record_for(self.form.layout, keys, values)
        if self.record is not None:
            self.parts = (one,)

    def keep_planes(self) -> Self:
        """This cache, or where it keeps records one over views of them, with a part for each of `names`."""
        if self.record is None:
            return self
        one = self.parts[0]
        planes = [(None, None)] * len(self.names) if one.keys is None else self._planes()
        parts = []
        for keys, values in planes:
            part = _apart(one)
            part.keys, part.values = keys, values
            parts.append(part)
        made = self.of(parts, self.form)
        made._converted = self._converted
        if one.keys is not None:
            made.adopt(self)
        return made

    def recorded(self, keys: mx.array, values: mx.array) -> mx.array:
        """New records of keys and values, of a cache that keeps them."""
        assert self.record is not None
        made = None if Lockstep.encoder is None or not self.record.takes(keys.dtype) else Lockstep.encoder(keys, values, self.record)
        return self.record.join(self.encoded(self.form, keys, values)) if made is None else made

    def _append(self, new: mx.array) -> tuple[HeldRecords, HeldRecords]:
        """Append records (rows, heads, tokens, words)."""
        part = self.parts[0]
        start = self._filled()
        end = start + new.shape[2]
        if part.keys is None or end > part.keys.shape[2]:
            part.update_and_fetch(new, _nothing(new))
        else:
            part.keys[:, :, start:end] = new
            self._advance(new.shape[2])
        return self.held(part.keys, end)

    def held(self, records: mx.array, slots: int) -> tuple[HeldRecords, HeldRecords]:
        """Keys and values of the first `slots` of records (rows, heads, tokens, words), of a cache that keeps them. Not views: a kernel for planes would take them for planes."""
        assert self.record is not None
        return HeldRecords(records, slots, self.record, 0, self.keys_of), HeldRecords(records, slots, self.record, 1, self.values_of)

    def _filled(self) -> int:
        """Slots with tokens, of caches that keep records."""
        raise NotImplementedError

    def _advance(self, tokens: int) -> None:
        """Count tokens that were written, in caches that keep records."""
        raise NotImplementedError

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts[0].make_mask(*args, **kwargs)

    @property
    def state(self) -> Any:
        return [part.state for part in self.keep_planes().parts], *dataclasses.astuple(self.form), self._converted

    @state.setter
    def state(self, value: Any) -> None:
        states, *numbers, converted = value
        self._set(tuple(self.inner.from_state(state) for state in states), self.form_class(*numbers))
        self._converted = converted

    def __copy__(self) -> Self:
        """A cache of its own: as little as a lent one does a copy change what it was made from."""
        made = self.of([_apart(part) for part in self.parts], self.form, self.record)
        made._converted = self._converted
        if not self.empty():
            made.adopt(self)
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


class Single(Lockstep):
    """One sequence's. `minimum_reusable_offset`: the token at which it was converted; earlier ones attended to full precision."""

    batch: ClassVar[type[Batch]]
    # Whether kernels read the buffers of caches that hold every token.
    lean: ClassVar[bool] = False
    minimum_reusable_offset: int
    _converted = _attribute("minimum_reusable_offset")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Encode and append; keys and values of all held tokens."""
        if not Single.lean or self.inner is not KVCache or self.record is not None or Lockstep.keeps_records:
            return super().update_and_fetch(keys, values)
        start = self.parts[0].offset
        end = start + keys.shape[2]
        if any(part.keys is None or end > part.keys.shape[2] for part in self.parts):
            # They grow.
            return super().update_and_fetch(keys, values)
        place = (slice(None), slice(None), slice(start, end))
        for part, (k, v) in zip(self.parts, self.encode(self.form, keys, values), strict=True):
            part.keys[place] = k
            part.values[place] = v
            part.offset = end
        layout = self.form.layout
        return (
            Held([part.keys for part in self.parts], end, layout, self.keys_of), Held([part.values for part in self.parts], end, layout, self.values_of)
        )  # fmt: skip

    def _set(self, parts: tuple[Any, ...], form: Any) -> None:
        super()._set(parts, form)
        self.minimum_reusable_offset = 0

    def _filled(self) -> int:
        return self.parts[0].offset

    def _advance(self, tokens: int) -> None:
        self.parts[0].offset += tokens

    @classmethod
    def merge(cls, caches: Sequence[Single]) -> Batch:
        """The batch of single caches, which are copied, as mlx-lm's merge does. Empty ones keep the scheme."""
        if len({cache.form for cache in caches}) > 1:
            raise ValueError("caches of different schemes cannot be merged")
        alike(caches)
        parts = [cls.inner.merge(list(column)) for column in zip(*(cache.parts for cache in caches), strict=True)]
        merged = cls.batch.of(parts, caches[0].form, next((cache.record for cache in caches if cache.record is not None), None))
        merged.bounds = [cache.minimum_reusable_offset for cache in caches]
        for cache in caches:
            merged.adopt(cache)
        return merged


class Batch(Lockstep):
    """Rows of different lengths, padded on the left. `bounds` has each row's `minimum_reusable_offset`."""

    single: ClassVar[type[Single]]
    bounds: list[int]
    _converted = _attribute("bounds", list)
    left_padding, _idx = of_first("left_padding"), of_first("_idx")

    def _set(self, parts: tuple[Any, ...], form: Any) -> None:
        super()._set(parts, form)
        self.bounds = [0] * self.left_padding.shape[0]

    def _filled(self) -> int:
        return self.parts[0]._idx

    def _advance(self, tokens: int) -> None:
        part = self.parts[0]
        part.offset = part.offset + tokens
        part._idx += tokens

    def prepare(self, **kwargs: Any) -> None:
        self._each(lambda part: part.prepare(**kwargs))

    def finalize(self) -> None:
        self._each(lambda part: part.finalize())

    def filter(self, batch_indices: Any) -> None:
        rows: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else list(batch_indices)
        self._each(lambda part: part.filter(batch_indices))
        self.bounds = [self.bounds[row] for row in rows]

    def extend(self, other: Self) -> None:
        if self.form != other.form:
            raise ValueError("caches of different schemes cannot be merged")
        alike([self, other])
        for part, more in zip(self.parts, other.parts, strict=True):
            part.extend(more)
        self.bounds = self.bounds + other.bounds
        self.adopt(other)

    def extract(self, idx: int) -> Single:
        row = self.single.of([part.extract(idx) for part in self.parts], self.form, self.record)
        row.minimum_reusable_offset = self.bounds[idx]
        row.adopt(self)
        return row

    def _each(self, act: Callable[[Any], Any]) -> None:
        for part in self.parts:
            act(part)


def alike(caches: Sequence[Lockstep]) -> None:
    """Have all keep records if one does, so that their parts go together."""
    record = next((cache.record for cache in caches if cache.record is not None), None)
    if record is None:
        return
    for cache in caches:
        if cache.record is None and cache.empty():
            cache.parts, cache.record = cache.parts[:1], record
        cache.keep_records()


def _nothing(records: mx.array) -> mx.array:
    """What stands for values beside records."""
    return mx.zeros((*records.shape[:3], 0), records.dtype)
