"""The quantized caches of the affine scheme."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..schemes import caches as forms
from ..schemes.spec import Affine
from .attention import PlainKind
from .batch import BatchKind, BatchRotatingKind
from .kind import Kind
from .lockstep import BatchedKind, LockstepKind, SingleKind
from .quantized import check_triple, read_format
from .rotating import RotatingKind
from .untrusted import FLOATS, Reader


class _Affine(LockstepKind):
    def read_form(self, reader: Reader) -> Affine:
        return Affine(*read_format(reader))

    def check_side(self, reader: Reader, side: str, arrays: Sequence[mx.array], form: Affine) -> None:
        packed, scales, _ = arrays
        if packed.dtype != mx.uint32 or scales.dtype not in FLOATS:
            raise reader.fault(f"scales and biases of the {side} do not belong together")
        check_triple(reader, side, arrays, form.bits, form.group_size)


class _Single(_Affine, SingleKind):
    pass


class _Batch(_Affine, BatchedKind):
    pass


KINDS: tuple[Kind, ...] = (
    _Single("kv-affine", "kv:quant", PlainKind(), forms.QuantizedKVCache),
    _Single("kv-rotating-affine", "kv:rotating-quant", RotatingKind(), forms.RotatingQuantizedKVCache),
    _Batch("batch-kv-affine", "batch:kv:quant", BatchKind(), forms.BatchQuantizedKVCache),
    _Batch("batch-kv-rotating-affine", "batch:kv:rotating-quant", BatchRotatingKind(), forms.BatchRotatingQuantizedKVCache),
)
