"""The quantized caches of the KV schemes: the kinds of their three parts, asked in turn."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..schemes import caches as forms
from ..schemes.caches import PARTS
from .attention import PlainKind
from .batch import BatchKind, BatchRotatingKind
from .kind import Dump, Kind, Tensor
from .quantized import BOUND, check_triple, read_format
from .rotating import RotatingKind
from .untrusted import FLOATS, LARGEST, Reader

SIDES = ("keys", "values")


class _Affine(Kind):
    """`inner` is the kind of each part; `form` how signatures call it."""

    inner: Kind
    form: str

    def __init__(self, name: str, form: str, inner: Kind, cls: type):
        self.name, self.form, self.inner = name, form, inner
        self.class_name = f"{cls.__module__}.{cls.__qualname__}"
        self._packed = copy.copy(inner)
        self._packed.elements = (mx.uint32,)

    def signature(self, cache: Any) -> str:
        return f"{self.form}:{cache.bits}:{cache.group_size}"

    def empty(self, cache: Any) -> bool:
        return self.inner.empty(cache.parts[0])

    def length(self, cache: Any) -> int | None:
        return self.inner.length(cache.parts[0])

    def nbytes(self, cache: Any) -> int:
        return sum(self.inner.nbytes(part) for part in cache.parts)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        lent = type(cache).of([self.inner.lend(part, n) for part in cache.parts], cache.bits, cache.group_size)
        self._copy_bounds(lent, cache)
        return lent

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.inner.can_cut(cache.parts[0], n)

    def _copy_bounds(self, made: Any, cache: Any) -> None:
        raise NotImplementedError

    def _dump_parts(self, cache: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields are the same for each part; tensors other than keys and values are, too."""
        dumps = [self.inner.dump(part) for part in cache.parts]
        fields, tensors = dumps[0]
        same = {name: tensor for name, tensor in tensors.items() if name not in SIDES}
        sides = {
            f"{side}_{name}": part.tensors[side] for side in SIDES for name, part in zip(PARTS, dumps, strict=True) if side in part.tensors
        }
        return {"bits": cache.bits, "group_size": cache.group_size, **fields}, {**same, **sides}

    def _load_parts(self, reader: Reader, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        bits, group_size = read_format(reader)
        names = {f"{side}_{part}" for side in SIDES for part in PARTS}
        same = {name: array for name, array in arrays.items() if name not in names}
        triples = [[reader.optional_array(f"{side}_{part}", 4) for part in PARTS] for side in SIDES]
        if any(array is not None for triple in triples for array in triple):
            self._check(reader, triples, bits, group_size)
        own = {name: value for name, value in fields.items() if name not in ("bits", "group_size", BOUND, "bounds")}
        parts = []
        for inner, keys, values in zip((self._packed, self.inner, self.inner), *triples, strict=True):
            held = {name: array for name, array in zip(SIDES, (keys, values), strict=True) if array is not None}
            # mlx-lm adds to the arrays of rows in place: each part has handles of its own.
            parts.append(inner.load(own, {**{name: array[...] if isinstance(array, mx.array) else array for name, array in same.items()}, **held}))
        return self.cache_class().of(parts, bits, group_size)  # type: ignore[attr-defined]

    def _check(self, reader: Reader, triples: list[list[Any]], bits: int, group_size: int) -> None:
        if any(array is None for triple in triples for array in triple):
            raise reader.fault("some of its tensors are missing")
        for side, triple in zip(SIDES, triples, strict=True):
            packed, scales, _ = triple
            if packed.dtype != mx.uint32 or scales.dtype not in FLOATS:
                raise reader.fault(f"scales and biases of the {side} do not belong together")
            check_triple(reader, side, triple, bits, group_size)
        if triples[0][1].dtype != triples[1][1].dtype:
            raise reader.fault("keys and values do not belong together")


class SingleAffineKind(_Affine):
    """QuantizedKVCache and RotatingQuantizedKVCache: cut as their parts are, but not before the token at which they were quantized."""

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
        batch = cache.batch.of(rows, cache.bits, cache.group_size)
        batch.bounds = [cache.minimum_reusable_offset]
        return batch


class BatchAffineKind(_Affine):
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


KINDS: tuple[Kind, ...] = (
    SingleAffineKind("kv-affine", "kv:quant", PlainKind(), forms.QuantizedKVCache),
    SingleAffineKind("kv-rotating-affine", "kv:rotating-quant", RotatingKind(), forms.RotatingQuantizedKVCache),
    BatchAffineKind("batch-kv-affine", "batch:kv:quant", BatchKind(), forms.BatchQuantizedKVCache),
    BatchAffineKind("batch-kv-rotating-affine", "batch:kv:rotating-quant", BatchRotatingKind(), forms.BatchRotatingQuantizedKVCache),
)
