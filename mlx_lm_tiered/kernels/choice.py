"""Whether a step's attention goes through the kernel: where the device has one and its self-test passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import block_check, blocks, encode
from .check import faster, passes
from .decode import LEAST_ELEMENTS, Format, Step, dialect, may_serve, supports, supports_listed, supports_records
from .layout import Layout
from .records import Record


def on_cuda() -> bool:
    """Whether mlx computes on a GPU that is not Apple's."""
    return mx.default_device().type == mx.gpu and not mx.metal.is_available()


def on_metal() -> bool:
    """Whether mlx computes on Apple's GPU."""
    return mx.default_device().type == mx.gpu and mx.metal.is_available()


def available() -> bool:
    """Whether there is a kernel for the default device."""
    return on_cuda() or on_metal()


_UNKNOWN: Any = object()


class Kernels:
    """The kernels of a start. Each format is tested at its first use; one that fails is off, and `fault` is told why, once.

    On Metal one that is slower than mlx's own way is off too, which is no fault.
    """

    def __init__(self, mode: str = "auto", fault: Callable[[str], None] = lambda text: None):
        self.state = "off" if mode == "off" else "on" if available() else "none for this device"
        self._fault = fault
        self._right: dict[Format, bool] = {}
        self._steps: dict[Any, Step | None] = {}
        self._encoders: dict[Any, encode.Encoder | None] = {}
        self._over_blocks: dict[Any, blocks.Step | None] = {}
        self._blocks_right: dict[blocks.Form, bool] = {}
        self.failed = self.slower = 0

    def attend(
        self, queries: mx.array, keys: Any, values: Any, slots: int, scale: float, mask: Any, sinks: Any, layout: Layout, otherwise: Callable[[mx.array, Any, Any, float], mx.array]
    ) -> mx.array | None:
        """The attention of a step over the first `slots` tokens of buffers; None where it is to be computed otherwise.

        `otherwise` says how that is, without a mask: on Metal it is timed.
        """
        if self.state != "on":
            return None
        kv_heads = keys[0].shape[1]
        shape, masked = queries.shape, isinstance(mask, mx.array)
        one = (shape, queries.dtype, kv_heads, keys[1].dtype, values[0].shape[3], values[1].dtype, layout, scale, masked, sinks is None)
        step = self._steps.get(one, _UNKNOWN)
        if step is _UNKNOWN:
            if not supports(queries, keys, values, slots, layout, mask, sinks):
                # As these are now; they may be too short, or under another mask.
                return None
            form = Format(layout, shape[3], shape[1] // kv_heads, queries.dtype, keys[1].dtype, scale, masked)
            step = self._steps[one] = self._step(form, shape[0], kv_heads, otherwise)
        if step is None or not may_serve(shape[0], kv_heads, slots, shape[3], mask):
            return None
        return step(queries, keys, values, slots, mask)

    def attend_records(
        self, queries: mx.array, held: mx.array, record: Record, slots: int, scale: float, mask: Any, sinks: Any, otherwise: Callable[[mx.array, Any, Any, float], mx.array]
    ) -> mx.array | None:
        """As `attend`, over the first `slots` of records (rows, heads, tokens, words)."""
        if self.state != "on":
            return None
        shape, masked = queries.shape, isinstance(mask, mx.array)
        one = (record, shape, queries.dtype, held.shape[1], scale, masked, sinks is None)
        step = self._steps.get(one, _UNKNOWN)
        if step is _UNKNOWN:
            if not supports_records(queries, held, record, slots, mask, sinks):
                return None
            form = Format(record.layout, shape[3], shape[1] // held.shape[1], queries.dtype, record.numbers, scale, masked, True)
            step = self._steps[one] = self._step(form, shape[0], held.shape[1], otherwise)
        if step is None or not may_serve(shape[0], held.shape[1], slots, shape[3], mask):
            return None
        return step.over_records(queries, held, slots, mask)

    def attend_listed(
        self, queries: mx.array, held: mx.array, record: Record, table: mx.array, lengths: mx.array, scale: float, block: int, longest: int
    ) -> mx.array | None:  # fmt: skip
        """Attention over records in blocks as `decode.decode_listed` has it; None where it is to be computed otherwise."""
        if self.state != "on":
            return None
        shape = queries.shape
        one = (record, shape, queries.dtype, held.shape, table.shape, table.dtype, lengths.shape, lengths.dtype, scale, block)
        step = self._steps.get(one, _UNKNOWN)
        if step is _UNKNOWN:
            step = None
            if supports_listed(queries, held, record, table, lengths, block):
                form = Format(record.layout, shape[3], shape[1] // held.shape[1], queries.dtype, record.numbers, scale, records=True, block=block)
                step = self._step(form, shape[0], held.shape[1], None)
            self._steps[one] = step
        return None if step is None else step.over_blocks(queries, held, table, lengths, longest)

    def _step(self, form: Format, rows: int, kv_heads: int, otherwise: Callable[[mx.array, Any, Any, float], mx.array] | None) -> Step | None:
        if form not in self._right:
            what = f"decode kernel for {form.layout} in heads of {form.dim}" + (f" and blocks of {form.block} tokens" if form.block else "")
            self._right[form] = self._serves(what, lambda: passes(form), lambda: otherwise is not None and faster(form, otherwise))
        return Step(rows, kv_heads, form) if self._right[form] else None

    def encode(self, keys: mx.array, values: mx.array, record: Record) -> mx.array | None:
        """The records of new keys and values; None where mlx's own operations are to make them."""
        if self.state != "on":
            return None
        one = (record, keys.shape[1], keys.dtype)
        encoder = self._encoders.get(one, _UNKNOWN)
        if encoder is _UNKNOWN:
            form = encode.Form(record, keys.shape[1], keys.dtype)
            if not encode.supports(form, keys, values):
                # As these are now; they may be too few.
                return None
            found = self._found(f"encoding kernel for {record.layout} in heads of {form.dim}", lambda: encode.right(form))
            encoder = self._encoders[one] = None if found is None else encode.Encoder(form, found)
        if encoder is None or keys.size < LEAST_ELEMENTS[dialect()]:
            return None
        return encoder(keys, values)

    def attend_blocks(
        self, queries: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, scale: float,
        block: int | None = None, longest: int | None = None,
    ) -> mx.array | None:  # fmt: skip
        """Attention over blocks of plain keys and values as `blocks.decode` has it; None where it is to be computed otherwise."""
        if self.state != "on":
            return None
        one = (queries.shape, queries.dtype, keys.shape, keys.dtype, values.shape, values.dtype, table.shape, table.dtype, lengths.shape, lengths.dtype, scale, block)
        step = self._over_blocks.get(one, _UNKNOWN)
        if step is _UNKNOWN:
            step = None
            if blocks.supports(queries, keys, values, table, lengths, block):
                form = blocks.form_of(queries, keys, scale, block)
                if form not in self._blocks_right:
                    what = f"decode kernel for blocks of {form.block} tokens in heads of {form.dim}"
                    self._blocks_right[form] = self._serves(what, lambda: block_check.right(form), lambda: block_check.faster(form))
                if self._blocks_right[form]:
                    step = blocks.step(queries.shape[0], keys.shape[1], form)
            self._over_blocks[one] = step
        return None if step is None else step(queries, keys, values, table, lengths, longest)

    def _serves(self, what: str, passes: Callable[[], bool], faster: Callable[[], bool]) -> bool:
        """Whether a kernel is right, and pays: nobody has timed them on Metal, where mlx's own way is a good one."""
        pays = dialect() != "metal"

        def right() -> bool:
            nonlocal pays
            passed = passes()
            pays = pays or (passed and faster())
            return passed

        found = bool(self._found(what, right))
        self.slower += found and not pays
        return found and pays

    def _found(self, what: str, right: Callable[[], Any]) -> Any:
        """What a self-test gives if it passes; if not, None, and the fault is told."""
        try:
            if found := right():
                return found
            reason = "its self-test gave other numbers"
        except Exception as error:  # A compiler and a driver fail in their own ways; all mean that mlx computes this.
            reason = str(error) or repr(error)
        self.failed += 1
        self._fault(f"the {what} is off: {reason}")
        return None
