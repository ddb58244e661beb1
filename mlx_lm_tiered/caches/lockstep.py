"""The caches of the KV schemes: the kinds of their parts, asked in turn. What a form's tensors must look like is left to its module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..schemes.spec import Form
from .kind import Dump, Kind, Tensor
from .quantized import BOUND
from .untrusted import LARGEST, Reader

SIDES = ("keys", "values")


class LockstepKind(Kind):
    """`inner` is the kind of each part; `prefix` how signatures call it, before the form's numbers."""

    inner: Kind
    prefix: str
    names: tuple[str, ...]
    # The fields beside the form's, the inner kind's and the bounds.
    extras: tuple[str, ...] = ()

    def __init__(self, name: str, prefix: str, inner: Kind, cls: type):
        self.name, self.prefix, self.inner = name, prefix, inner
        self.class_name = f"{cls.__module__}.{cls.__qualname__}"
        self.names = cls.names  # type: ignore[attr-defined]
        self._packed = copy.copy(inner)
        self._packed.elements = (mx.uint32,)

    def read_form(self, reader: Reader) -> Form:
        """The form, from its fields. Raises ValueError."""
        raise NotImplementedError

    def check_side(self, reader: Reader, side: str, arrays: Sequence[mx.array], form: Any) -> None:
        """Whether one side's arrays, each of four dimensions, are what the form makes. Raises ValueError."""
        raise NotImplementedError

    def signature(self, cache: Any) -> str:
        return ":".join(map(str, (self.prefix, *dataclasses.astuple(cache.form))))

    def empty(self, cache: Any) -> bool:
        return self.inner.empty(cache.parts[0])

    def length(self, cache: Any) -> int | None:
        return self.inner.length(cache.parts[0])

    def nbytes(self, cache: Any) -> int:
        return sum(self.inner.nbytes(part) for part in cache.parts)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache).of([self.inner.lend(part, n) for part in cache.parts], cache.form, cache.record)
        if not self.empty(cache):
            lent.adopt(cache)
        self._copy_bounds(lent, cache)
        return lent

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.inner.can_cut(cache.parts[0], n)

    def order(self, cache: Any) -> None:
        for part in cache.parts:
            self.inner.order(part)

    def unwinds(self, cache: Any, whole: bool) -> bool:
        return self.inner.unwinds(cache.parts[0], whole)

    def unwind(self, cache: Any, n: int) -> None:
        for part in cache.parts:
            self.inner.unwind(part, n)

    def _copy_bounds(self, made: Any, cache: Any) -> None:
        raise NotImplementedError

    def _dump_parts(self, cache: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields are the same for each part; tensors other than keys and values are, too."""
        dumps = [self.inner.dump(part) for part in cache.keep_planes().parts]
        fields, tensors = dumps[0]
        same = {name: tensor for name, tensor in tensors.items() if name not in SIDES}
        sides = {
            f"{side}_{name}": part.tensors[side] for side in SIDES for name, part in zip(self.names, dumps, strict=True) if side in part.tensors
        }
        own = {**dataclasses.asdict(cache.form), **{name: getattr(cache, name) if sides else None for name in self.extras}}
        return {**own, **fields}, {**same, **sides}

    def _load_parts(self, reader: Reader, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        form = self.read_form(reader)
        names = {f"{side}_{part}" for side in SIDES for part in self.names}
        same = {name: array for name, array in arrays.items() if name not in names}
        sides = [[reader.optional_array(f"{side}_{part}", 4) for part in self.names] for side in SIDES]
        held = [array for side in sides for array in side]
        if any(array is not None for array in held):
            for side, found in zip(SIDES, sides, strict=True):
                there = [array for array in found if array is not None]
                if len(there) < len(found):
                    raise reader.fault("some of its tensors are missing")
                self.check_side(reader, side, there, form)
        own = {f.name for f in dataclasses.fields(form)} | {BOUND, "bounds", *self.extras}
        inner_fields = {name: value for name, value in fields.items() if name not in own}
        parts = []
        for place, (keys, values) in enumerate(zip(*sides, strict=True)):
            inner = self.inner if place else self._packed
            theirs = {name: array for name, array in zip(SIDES, (keys, values), strict=True) if array is not None}
            # mlx-lm adds to the arrays of rows in place: each part has handles of its own.
            theirs |= {name: array[...] if isinstance(array, mx.array) else array for name, array in same.items()}
            parts.append(inner.load(inner_fields, theirs))
        return self.cache_class().of(parts, form)  # type: ignore[attr-defined]


class SingleKind(LockstepKind):
    """Of one sequence: cut as their parts are, but not before the token at which they were converted."""

    def quantized(self, cache: Any) -> bool:
        return True

    def can_cut(self, cache: Any, n: int) -> bool:
        return super().can_cut(cache, n) and (self.empty(cache) or n == cache.offset or n >= cache.minimum_reusable_offset)

    def minimum_reusable(self, cache: Any) -> int:
        return 0 if self.empty(cache) else min(cache.minimum_reusable_offset, cache.offset)

    def stays_cuttable(self, cache: Any) -> bool:
        return self.inner.stays_cuttable(cache.parts[0])

    def _copy_bounds(self, made: Any, cache: Any) -> None:
        made.minimum_reusable_offset = cache.minimum_reusable_offset

    def dump(self, cache: Any) -> Dump:
        fields, tensors = self._dump_parts(cache)
        return Dump({**fields, BOUND: cache.minimum_reusable_offset}, tensors)

    def fields(self, cache: Any, offset: int) -> dict[str, Any]:
        held = {name: getattr(cache, name) for name in self.extras} if offset else {}
        return {**self.dump(cache).fields, **held, "offset": offset}

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        bound = reader.integer(BOUND)
        cache = self._load_parts(reader, fields, arrays)
        cache.minimum_reusable_offset = bound
        return cache

    def row(self, cache: Any) -> Any | None:
        rows = [self.inner.row(part) for part in cache.parts]
        if any(row is None for row in rows):
            return None
        batch = cache.batch.of(rows, cache.form, cache.record)
        batch.bounds = [cache.minimum_reusable_offset]
        batch.adopt(cache)
        return batch


class BatchedKind(LockstepKind):
    """Their batch forms."""

    def _copy_bounds(self, made: Any, cache: Any) -> None:
        made.bounds = list(cache.bounds)

    def dump(self, cache: Any) -> Dump:
        fields, tensors = self._dump_parts(cache)
        return Dump({**fields, "bounds": list(cache.bounds)}, tensors)

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        reader = Reader(self.name, fields, arrays)
        bounds = reader.value("bounds")
        if not isinstance(bounds, list) or any(type(bound) is not int or not 0 <= bound <= LARGEST for bound in bounds):
            raise reader.fault("field bounds is not a list of tokens")
        cache = self._load_parts(reader, fields, arrays)
        if len(bounds) != cache.left_padding.shape[0]:
            raise reader.fault("its bounds are not one for each row")
        cache.bounds = bounds
        return cache
