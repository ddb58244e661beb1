"""The caches of the TurboQuant scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..schemes.spec import Turbo
from ..schemes.turbo import BatchTurboQuantKVCache, TurboQuantKVCache, type_name
from ..turboquant.codebooks import GROUP
from .attention import PlainKind
from .batch import BatchKind
from .kind import Kind
from .lockstep import BatchedKind, LockstepKind, SingleKind
from .untrusted import FLOATS, Reader

_TYPES = {type_name(dtype) for dtype in FLOATS}


class _Turbo(LockstepKind):
    extras = ("element",)

    def read_form(self, reader: Reader) -> Turbo:
        key_bits, value_bits = reader.integer("key_bits"), reader.integer("value_bits")
        try:
            return Turbo(key_bits, value_bits)
        except ValueError as error:
            raise reader.fault(str(error)) from None

    def check_side(self, reader: Reader, side: str, arrays: Sequence[mx.array], form: Turbo) -> None:
        packed, scales = arrays
        if packed.dtype != mx.uint32 or scales.dtype != mx.float16:
            raise reader.fault(f"the {side} have impossible types")
        bits, numbers = (form.key_bits, 2) if side == "keys" else (form.value_bits, 1)
        groups = packed.shape[3] // bits
        if packed.shape[:3] != scales.shape[:3] or packed.shape[3] != groups * bits or scales.shape[3] != groups * numbers:
            raise reader.fault(f"the {side} have impossible shapes")
        if reason := form.unfit(groups * GROUP):
            raise reader.fault(reason)

    def _load_parts(self, reader: Reader, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        element = reader.value("element")
        cache = super()._load_parts(reader, fields, arrays)
        if not (element is None if cache.keys is None else isinstance(element, str) and element in _TYPES):
            raise reader.fault("field element does not name the type of its keys")
        cache.element = element
        return cache


class _Single(_Turbo, SingleKind):
    pass


class _Batch(_Turbo, BatchedKind):
    pass


KINDS: tuple[Kind, ...] = (
    _Single("kv-turbo", "kv:turboquant", PlainKind(), TurboQuantKVCache),
    _Batch("batch-kv-turbo", "batch:kv:turboquant", BatchKind(), BatchTurboQuantKVCache),
)
