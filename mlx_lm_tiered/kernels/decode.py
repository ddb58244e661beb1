"""Decode attention by the kernel of `source.py`, over the very arrays that a quantized cache hands out.

They are views of the cache's buffers, and the kernel takes their strides, so nothing is
sliced out or copied, and their length is an argument, so nothing is compiled anew from
one token to the next.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from . import source
from .tuning import Tuning, choose

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
LARGEST_DIM = 256
MOST_SPLITS = 512
INPUTS = ["q", "kp", "ks", "kb", "vp", "vs", "vb", "mask", "scale"]
# Bytes of shared memory a block may have. And elements from which on mlx passes every array in the same address space: to a Metal kernel
# it passes smaller ones as constants, and the cache's own are read as device memory.
MOST_SHARED = {"cuda": 48 << 10, "metal": 32 << 10}
LEAST_ELEMENTS = {"cuda": 1, "metal": 8}
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


@cache
def dialect() -> str:
    """Of the device's kernels: "metal" or "cuda"."""
    return "metal" if mx.metal.is_available() else "cuda"


def supports(queries: mx.array, keys: Any, values: Any, bits: int, group_size: int, mask: Any, sinks: Any) -> bool:
    """Whether the kernel computes this: one query a row, keys and values of one head dimension, a boolean mask over tokens or none."""
    rows, heads, length, dim = queries.shape
    kv_heads, slots = keys[0].shape[1:3]
    if length != 1 or sinks is not None or bits not in BITS or group_size not in GROUPS:
        return False
    if dim % group_size or dim > LARGEST_DIM or heads % kv_heads or slots == 0 or slots * dim >= 1 << 31:
        return False
    if keys[1].size < LEAST_ELEMENTS[dialect()]:
        return False
    if keys[1].shape[3] * group_size != dim or values[1].shape[3] * group_size != dim:
        return False
    if queries.dtype not in _FLOATS or keys[1].dtype not in _FLOATS or values[1].dtype != keys[1].dtype:
        return False
    if mask is None or isinstance(mask, str):
        # A causal mask hides nothing from the one last query.
        return mask in (None, "causal")
    if mask.dtype != mx.bool_ or rows * slots < LEAST_ELEMENTS[dialect()]:
        return False
    return _per_token(mask, rows, slots) is not None


def _per_token(mask: mx.array, rows: int, slots: int) -> mx.array | None:
    """A mask as (rows, 1, 1, slots), or None where it has another form."""
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, rows) or shape[1:3] != (1, 1) or shape[3] != slots:
        return None
    return mx.broadcast_to(mask, (rows, 1, 1, slots))


@cache
def _parts(language: str, warps: int, resident: int) -> Any:
    make, header = (mx.fast.metal_kernel, source.header("metal")) if language == "metal" else (mx.fast.cuda_kernel, source.bounded(warps, resident))
    # Views are read by their strides: nothing may be made contiguous.
    return make(
        name=f"tiered_decode_{source.digest(language)}_{resident}", input_names=INPUTS, output_names=["po", "pm", "pl"],
        header=header, source=source.body(language, "decode.body"), ensure_row_contiguous=False,
    )  # fmt: skip


@cache
def _merge(language: str) -> Any:
    make = mx.fast.metal_kernel if language == "metal" else mx.fast.cuda_kernel
    return make(
        name=f"tiered_merge_{source.digest(language)}", input_names=["po", "pm", "pl"], output_names=["out"],
        header=source.header(language), source=source.body(language, "merge.body"),
    )  # fmt: skip


@cache
def _constant(value: float | None) -> mx.array:
    """The scale as an array, or a mask that is not read."""
    made = mx.ones((1, 1, 1, 1), mx.bool_) if value is None else mx.array([value], mx.float32)
    mx.eval(made)
    return made


def warps_that_fit(dim: int, each: int, warps: int, shared: int) -> int:
    """At most `warps`, and no more than whose outputs `shared` bytes of a block's memory hold."""
    while warps > 1 and warps * min(each, 8) * (dim + 2 + dim // 32) * 4 > shared:
        warps //= 2
    return warps


class _Calls(NamedTuple):
    """What the two kernels are called with besides arrays."""

    parts: Any
    parts_options: dict[str, Any]
    merge: Any
    merge_options: dict[str, Any]


@lru_cache(maxsize=256)
def _calls(language: str, rows: int, heads: int, kv_heads: int, dim: int, bits: int, group_size: int, masked: bool, queries: mx.Dtype, scales: mx.Dtype, tuning: Tuning) -> _Calls:
    each = heads // kv_heads
    warps = warps_that_fit(dim, each, tuning.warps, MOST_SHARED[language])
    # Splits without tokens are right, and as many as these keep the merge's inputs from being small.
    splits = min(max(tuning.splits, LEAST_ELEMENTS[language]), MOST_SPLITS)
    resident = tuning.resident if warps == tuning.warps else 0
    template = [
        ("D", dim), ("BITS", bits), ("GS", group_size), ("G", each), ("HK", kv_heads), ("W", warps), ("MASKED", masked), ("T", queries), ("S", scales)
    ]  # fmt: skip
    parts = {
        "template": template, "grid": (splits * 32 * warps, rows * kv_heads, -(-each // 8)), "threadgroup": (32 * warps, 1, 1),
        "output_shapes": [(rows * heads, splits, dim), (rows * heads, splits), (rows * heads, splits)], "output_dtypes": [mx.float32] * 3,
    }  # fmt: skip
    merge = {
        "template": [("D", dim), ("T", queries)], "grid": (rows * heads * dim * 4, 1, 1), "threadgroup": (dim * 4, 1, 1),
        "output_shapes": [(rows, heads, 1, dim)], "output_dtypes": [queries],
    }  # fmt: skip
    return _Calls(_parts(language, warps, resident), parts, _merge(language), merge)


def decode(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, bits: int, group_size: int, tuning: Tuning | None = None
) -> mx.array:
    """Attention of `queries` (rows, heads, 1, dim) that `supports` accepts over (packed, scales, biases) of keys and values. Returns their shape."""
    rows, heads, _, dim = queries.shape
    kv_heads, slots = keys[0].shape[1:3]
    each = heads // kv_heads
    language = dialect()
    tuning = tuning or choose(slots, rows * kv_heads * -(-each // 8), bits, dim, each, language)
    masked = isinstance(mask, mx.array)
    calls = _calls(language, rows, heads, kv_heads, dim, bits, group_size, masked, queries.dtype, keys[1].dtype, tuning)
    hidden = _per_token(mask, rows, slots) if masked else _constant(None)
    found = calls.parts(inputs=[queries, *keys, *values, hidden, _constant(scale)], **calls.parts_options)
    return calls.merge(inputs=found, **calls.merge_options)[0]
