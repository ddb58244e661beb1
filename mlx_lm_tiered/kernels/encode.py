"""TurboQuant's encoding of new tokens in one kernel: mlx would take some sixty operations for it, in each layer of each step."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..turboquant import codebooks, codec
from . import source
from .decode import LEAST_ELEMENTS, dialect

INPUTS = ("keys", "values", "bounds", "signs", "root")
OUTPUTS = ("kpacked", "kscales", "vpacked", "vscales")
# Of values whose rotation was summed in another order: indices that may be the next one.
MOST_OTHERS = 1e-3


class Form(NamedTuple):
    """What one kernel is compiled for."""

    key_bits: int
    value_bits: int
    dim: int
    heads: int
    dtype: mx.Dtype


def encode(form: Form, keys: mx.array, values: mx.array) -> list[mx.array]:
    """Packed keys, their scales and zero points, packed values, their scales; as `codec.encode_keys` and `encode_values` have them, for (rows, heads, tokens, dim)."""
    rows, heads, tokens, dim = keys.shape
    groups, language = dim // codebooks.GROUP, dialect()
    widths = (groups * form.key_bits, 2 * groups, groups * form.value_bits, groups)
    return kernel(language, form)(
        inputs=[keys, values, *_constants(form.value_bits, dim)],
        grid=(tokens * dim, rows * heads, 1), threadgroup=(dim, 1, 1),
        output_shapes=[(rows, heads, tokens, width) for width in widths], output_dtypes=[mx.uint32, mx.float16] * 2,
    )  # fmt: skip


def constants(form: Form) -> dict[str, int | float]:
    """Of the text."""
    furthest, smallest = codec.FURTHEST_ZERO[form.key_bits], codec.SMALLEST
    return {"D": form.dim, "KB": form.key_bits, "VB": form.value_bits, "HEADS": form.heads, "FURTHEST": furthest, "SMALLEST": smallest}


def supports(form: Form, keys: mx.array, values: mx.array) -> bool:
    """Whether these are encoded by the kernel."""
    return codebooks.unfit(form.dim) is None and keys.shape == values.shape and values.dtype == keys.dtype and keys.size >= LEAST_ELEMENTS[dialect()]


@cache
def kernel(language: str, form: Form) -> Any:
    """mlx's for a form."""
    return source.kernel(language, ("encode.body",), tuple(constants(form).items()), INPUTS, OUTPUTS)


@cache
def _constants(bits: int, dim: int) -> list[mx.array]:
    """Boundaries between centroids, with some zeros after few of them, signs, and one over the root of `dim`, often enough: a Metal kernel has small arrays elsewhere."""
    bounds = np.zeros(max(8, 1 << bits), np.float32)
    bounds[: (1 << bits) - 1] = np.array(codec.bounds(bits))
    made = [mx.array(array) * 1 for array in (bounds, np.array(codebooks.signs(dim), np.float32), np.full(8, dim**-0.5, np.float32))]
    mx.eval(made)
    return made


def right(form: Form) -> bool:
    """The self-test: a few tokens, some of them odd ones, against mlx's own operations. Raises what mlx raises if the kernel cannot be compiled or run."""
    keys, values = (mx.random.normal((2, form.heads, 9, form.dim), key=mx.random.key(seed)).astype(form.dtype) for seed in range(2))
    odd = mx.array([0.0, 1.0, -3e-5, 7.1, 1e4] + [1.0] * 4).reshape(-1, 1).astype(form.dtype)
    keys = mx.concatenate([keys[:1] + odd * 30, odd * mx.ones_like(keys[1:])])
    values = mx.concatenate([values[:1] * odd, values[1:]])
    k, v = codec.encode_keys(keys, form.key_bits), codec.encode_values(values, form.value_bits)
    found = encode(form, keys, values)
    if not all(mx.array_equal(a, b).item() for a, b in zip(found[:2], k, strict=True)):
        return False
    others = (codec.unpack(found[2], form.value_bits) != codec.unpack(v.packed, form.value_bits)).mean().item()
    return others <= MOST_OTHERS and mx.allclose(found[3], v.scales, rtol=2e-3, atol=1e-7).item()
