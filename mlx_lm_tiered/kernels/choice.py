"""Whether a step's attention goes through the kernel: where the device has one and its self-test passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .check import Format, faster, passes
from .decode import decode, dialect, supports


def on_cuda() -> bool:
    """Whether mlx computes on a GPU that is not Apple's."""
    return mx.default_device().type == mx.gpu and not mx.metal.is_available()


def on_metal() -> bool:
    """Whether mlx computes on Apple's GPU."""
    return mx.default_device().type == mx.gpu and mx.metal.is_available()


def available() -> bool:
    """Whether there is a kernel for the default device."""
    return on_cuda() or on_metal()


class Kernels:
    """The kernels of a start. Each format is tested at its first use; one that fails is off, and `fault` is told why, once.

    On Metal one that is slower than mlx's own way is off too, which is no fault.
    """

    def __init__(self, mode: str = "auto", fault: Callable[[str], None] = lambda text: None):
        self.state = "off" if mode == "off" else "on" if available() else "none for this device"
        self._fault = fault
        self._right: dict[Format, bool] = {}
        self.failed = self.slower = 0

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any, bits: int, group_size: int
    ) -> mx.array | None:
        """The attention of a step; None where it is to be computed otherwise."""
        if self.state != "on" or not supports(queries, keys, values, bits, group_size, mask, sinks):
            return None
        each = queries.shape[1] // keys[0].shape[1]
        form = Format(bits, group_size, queries.shape[3], each, queries.dtype, keys[1].dtype, isinstance(mask, mx.array))
        right = self._right.get(form)
        if right is None:
            right = self._right[form] = self._test(form)
        return decode(queries, keys, values, scale, mask, bits, group_size) if right else None

    def _test(self, form: Format) -> bool:
        try:
            if passes(form):
                # Nobody has timed the kernels on Metal, where mlx's own way is a good one.
                right = dialect() != "metal" or faster(form)
                self.slower += not right
                return right
            reason = "its self-test gave other numbers"
        except Exception as error:  # A compiler and a driver fail in their own ways; all mean that mlx computes this.
            reason = str(error) or repr(error)
        self.failed += 1
        self._fault(f"the decode kernel for {form} is off: {reason}")
        return False
