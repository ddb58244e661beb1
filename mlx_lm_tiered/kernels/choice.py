"""Whether a step's attention goes through the kernel: where the device has one and its self-test passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .check import faster, passes
from .decode import Format, Step, dialect, may_serve, supports
from .layout import Layout


def on_cuda() -> bool:
    """Whether mlx computes on a GPU that is not Apple's."""
    return mx.default_device().type == mx.gpu and not mx.metal.is_available()


def on_metal() -> bool:
    """Whether mlx computes on Apple's GPU."""
    return mx.default_device().type == mx.gpu and mx.metal.is_available()


def available() -> bool:
    """Whether there is a kernel for the default device."""
    return on_cuda() or on_metal()


_UNKNOWN = object()


class Kernels:
    """The kernels of a start. Each format is tested at its first use; one that fails is off, and `fault` is told why, once.

    On Metal one that is slower than mlx's own way is off too, which is no fault.
    """

    def __init__(self, mode: str = "auto", fault: Callable[[str], None] = lambda text: None):
        self.state = "off" if mode == "off" else "on" if available() else "none for this device"
        self._fault = fault
        self._right: dict[Format, bool] = {}
        self._steps: dict[Any, Step | None] = {}
        self.failed = self.slower = 0

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any, layout: Layout, otherwise: Callable[[mx.array, Any, Any, float], mx.array]
    ) -> mx.array | None:
        """The attention of a step; None where it is to be computed otherwise. `otherwise` says how that is, without a mask: on Metal it is timed."""
        if self.state != "on":
            return None
        kv_heads, slots = keys[0].shape[1:3]
        shape, masked = queries.shape, isinstance(mask, mx.array)
        one = (shape, queries.dtype, kv_heads, keys[1].dtype, values[0].shape[3], values[1].dtype, layout, scale, masked, sinks is None)
        step = self._steps.get(one, _UNKNOWN)
        if step is _UNKNOWN:
            if not supports(queries, keys, values, layout, mask, sinks):
                # As these are now; they may be too short, or under another mask.
                return None
            form = Format(layout, shape[3], shape[1] // kv_heads, queries.dtype, keys[1].dtype, scale, masked)
            if form not in self._right:
                self._right[form] = self._test(form, otherwise)
            step = self._steps[one] = Step(shape[0], kv_heads, form) if self._right[form] else None
        if step is None or not may_serve(shape[0], kv_heads, slots, shape[3], mask):
            return None
        return step(queries, keys, values, mask)

    def _test(self, form: Format, otherwise: Callable[[mx.array, Any, Any, float], mx.array]) -> bool:
        try:
            if passes(form):
                # Nobody has timed the kernels on Metal, where mlx's own way is a good one.
                right = dialect() != "metal" or faster(form, otherwise)
                self.slower += not right
                return right
            reason = "its self-test gave other numbers"
        except Exception as error:  # A compiler and a driver fail in their own ways; all mean that mlx computes this.
            reason = str(error) or repr(error)
        self.failed += 1
        self._fault(f"the decode kernel for {form.layout} in heads of {form.dim} is off: {reason}")
        return False
