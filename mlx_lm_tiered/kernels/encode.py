"""Encoding of new tokens in one kernel, as records (`records.py`): mlx would take some sixty operations for TurboQuant's, and two for affine ones, in each layer of each step."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..turboquant import codebooks, codec
from ..turboquant.packing import unpack
from . import source
from .decode import LEAST_ELEMENTS, dialect
from .records import Planes, Record

OUTPUTS = ("made",)
# Of values whose rotation was summed in another order: indices that may be the next one.
MOST_OTHERS = 1e-3
LARGEST_DIM = 1024


class Form(NamedTuple):
    """What one kernel is compiled for: records out of `heads` heads of keys and values of a type."""

    record: Record
    heads: int
    dtype: mx.Dtype

    @property
    def dim(self) -> int:
        return self.record.key_dim


class Rounding(NamedTuple):
    """How mlx quantizes on a device: whether its search for the highest of a group begins at 0, and halves are rounded away from it."""

    from_zero: bool
    away: bool


# A GPU's, and a processor's.
ROUNDINGS = (Rounding(True, True), Rounding(False, False))


class Encoder:
    """One form's kernel."""

    def __init__(self, form: Form, rounding: Rounding = ROUNDINGS[0]):
        self._kernel = kernel(dialect(), form, rounding)
        self._tables = constants_of(form)
        self._words = form.record.words

    def __call__(self, keys: mx.array, values: mx.array) -> mx.array:
        """The records (rows, heads, tokens, words) of keys and values (rows, heads, tokens, dim); as `planes` has them."""
        rows, heads, tokens, dim = keys.shape
        return self._kernel(
            inputs=[keys, values, *self._tables], grid=(tokens * dim, rows * heads, 1), threadgroup=(dim, 1, 1),
            output_shapes=[(rows, heads, tokens, self._words)], output_dtypes=[mx.uint32],
        )[0]  # fmt: skip


def planes(form: Form, keys: mx.array, values: mx.array) -> Planes:
    """The same by mlx's own operations, not in records yet."""
    layout = form.record.layout
    if layout.turbo:
        return list(zip(codec.encode_keys(keys, layout.key_bits), codec.encode_values(values, layout.value_bits), strict=True))
    sides = (mx.quantize(side, group_size=layout.group_size, bits=layout.key_bits) for side in (keys, values))
    return list(zip(*sides, strict=True))


def inputs(form: Form) -> tuple[str, ...]:
    return ("keys", "values", "bounds", "signs", "root") if form.record.layout.turbo else ("keys", "values")


def text(form: Form) -> str:
    """The file of the kernel."""
    return "encode.body" if form.record.layout.turbo else "quantize.body"


def constants(form: Form, rounding: Rounding) -> dict[str, Any]:
    """Of the text."""
    layout = form.record.layout
    found = {"D": form.dim, "KB": layout.key_bits, "HEADS": form.heads, "WORDS": form.record.words}
    if layout.turbo:
        return {**found, "VB": layout.value_bits, "FURTHEST": codec.FURTHEST_ZERO[layout.key_bits], "SMALLEST": codec.SMALLEST}
    return {**found, "GS": layout.group_size, "FROM_ZERO": int(rounding.from_zero), "AWAY": int(rounding.away), "S": form.record.numbers}


def supports(form: Form, keys: mx.array, values: mx.array) -> bool:
    """Whether these are encoded by the kernel."""
    record, language = form.record, dialect()
    if record.layout.turbo:
        fits = codebooks.unfit(form.dim) is None
    else:
        # On Metal mlx's own two operations serve, and no records are kept.
        fits = language == "cuda" and form.dim <= LARGEST_DIM and record.takes(form.dtype)
    return fits and keys.shape == values.shape and values.dtype == keys.dtype and keys.size >= LEAST_ELEMENTS[language]


@cache
def kernel(language: str, form: Form, rounding: Rounding = ROUNDINGS[0]) -> Any:
    """mlx's for a form."""
    return source.kernel(language, (text(form),), tuple(constants(form, rounding).items()), inputs(form), OUTPUTS)


def constants_of(form: Form) -> list[mx.array]:
    """Arrays that the kernel is given beside keys and values."""
    return _tables(form.record.layout.value_bits, form.dim) if form.record.layout.turbo else []


@cache
def _tables(bits: int, dim: int) -> list[mx.array]:
    """Boundaries between centroids, with some zeros after few of them, signs, and one over the root of `dim`, often enough: a Metal kernel has small arrays elsewhere."""
    bounds = np.zeros(max(8, 1 << bits), np.float32)
    bounds[: (1 << bits) - 1] = np.array(codec.bounds(bits))
    made = [mx.array(array) * 1 for array in (bounds, np.array(codebooks.signs(dim), np.float32), np.full(8, dim**-0.5, np.float32))]
    mx.eval(made)
    return made


def right(form: Form) -> Rounding | None:
    """The self-test: a few tokens, some of them odd ones, against mlx's own operations. The rounding under which they agree; None where they do not.

    Raises what mlx raises if the kernel cannot be compiled or run.
    """
    keys, values = (mx.random.normal((2, form.heads, 9, form.dim), key=mx.random.key(seed)).astype(form.dtype) for seed in range(2))
    odd = mx.array([0.0, 1.0, -3e-5, 7.1, 1e4] + [1.0] * 4).reshape(-1, 1).astype(form.dtype)
    keys = mx.concatenate([keys[:1] + odd * 5, odd * mx.ones_like(keys[1:])])
    values = mx.concatenate([values[:1] * odd, values[1:]])
    wanted = planes(form, keys, values)
    for rounding in ROUNDINGS[: 1 if form.record.layout.turbo else 2]:
        if _agree(form.record, form.record.split(Encoder(form, rounding)(keys, values)), wanted):
            return rounding
    return None


def _agree(record: Record, found: Planes, wanted: Planes) -> bool:
    same = [[bool(mx.array_equal(a, b).item()) for a, b in zip(one, other, strict=True)] for one, other in zip(found, wanted, strict=True)]
    if not record.layout.turbo:
        return all(map(all, same))
    bits = record.layout.value_bits
    others: Any = (unpack(mx.contiguous(found[0][1]), bits) != unpack(wanted[0][1], bits)).mean().item()
    return all(keys for keys, _ in same) and others <= MOST_OTHERS and bool(mx.allclose(found[1][1], wanted[1][1], rtol=2e-3, atol=1e-7).item())
