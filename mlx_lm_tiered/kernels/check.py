"""The self-test: a small random case through the kernel, against attention over dequantized keys and values in fp32. And whether it is fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx

from .decode import decode, dialect
from .tuning import Tuning, choose

SLOTS, CAPACITY, SPLITS = 301, 512, 3
# Of the timing: about what a conversation has, and so many calls at once, as of a model's layers.
TIMED_TOKENS, TIMED_KV_HEADS, CALLS, REPEATS = 4096, 8, 8, 5
# Of the largest output, by the dtype of queries and so of outputs.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}


class Format(NamedTuple):
    """What one compiled kernel is for."""

    bits: int
    group_size: int
    dim: int
    each: int  # query heads of a KV head
    queries: mx.Dtype
    scales: mx.Dtype
    masked: bool = False


def sides(keys: mx.array, values: mx.array, bits: int, group_size: int, slots: int) -> Any:
    """Both quantized, as views of `slots` tokens of larger buffers, as a cache hands them out."""
    made = [mx.quantize(side, group_size=group_size, bits=bits) for side in (keys, values)]
    mx.eval(made)
    return [tuple(part[:, :, :slots] for part in side) for side in made]


def reference(queries: mx.array, keys: Any, values: Any, scale: float, mask: mx.array | None, bits: int, group_size: int) -> mx.array:
    """What the kernel should give, in fp32. The views are copied first: not every backend reads strided codes."""

    def whole(side: Any) -> mx.array:
        packed, scales, biases = (mx.contiguous(part) for part in side)
        made = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits)
        return mx.repeat(made, queries.shape[1] // made.shape[1], axis=1)

    scores = (queries.astype(mx.float32) * scale * whole(keys)).sum(axis=-1)[:, :, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    # Sums rather than products of matrices, which some GPUs take in fewer bits.
    return (weights.swapaxes(-1, -2) * whole(values)).sum(axis=2, keepdims=True)


def error(form: Format, tuning: Tuning | None = None) -> float:
    """The largest error of the kernel for that format, relative to the largest output. Raises what mlx raises if it cannot be compiled or run."""
    rows, kv_heads = 2, 2
    keys = [mx.random.key(seed) for seed in range(3)]
    q = mx.random.normal((rows, 1, kv_heads * form.each, form.dim), key=keys[0]).astype(form.queries).swapaxes(1, 2)
    k, v = (mx.random.normal((rows, kv_heads, CAPACITY, form.dim), key=key).astype(form.scales) + 0.3 for key in keys[1:])
    k_side, v_side = sides(k, v, form.bits, form.group_size, SLOTS)
    mask = mx.arange(SLOTS) >= mx.array([3, 40]).reshape(2, 1, 1, 1) if form.masked else None
    scale = form.dim**-0.5
    # As it will be compiled; in so few splits that warps go round more than once.
    tuning = tuning or replace(choose(SLOTS, rows * kv_heads, form.bits, form.dim, form.each, dialect()), splits=SPLITS)
    got = decode(q, k_side, v_side, scale, mask, form.bits, form.group_size, tuning).astype(mx.float32)
    want = reference(q, k_side, v_side, scale, mask, form.bits, form.group_size)
    return (mx.abs(got - want).max() / mx.abs(want).max()).item()


def passes(form: Format) -> bool:
    """Whether the kernel is right. NaN is not."""
    return error(form) <= TOLERANCE[form.queries]


def stock(queries: mx.array, keys: Any, values: Any, scale: float, bits: int, group_size: int) -> mx.array:
    """Attention as mlx-lm has it over quantized KV, for one query a row."""
    rows, heads, _, dim = queries.shape
    kv_heads = keys[0].shape[1]
    q = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, 1, dim)
    k, v = (tuple(mx.expand_dims(part, 2) for part in side) for side in (keys, values))
    scores = mx.quantized_matmul(q, *k, transpose=True, group_size=group_size, bits=bits)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return mx.quantized_matmul(weights, *v, transpose=False, group_size=group_size, bits=bits).reshape(queries.shape)


def seconds(attend: Callable[[], mx.array]) -> float:
    """What CALLS of it take, evaluated at once: the median of REPEATS, after one that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        mx.eval([attend() for _ in range(CALLS)])
        times.append(time.perf_counter() - started)
    return median(times[1:])


def faster(form: Format) -> bool:
    """Whether the kernel takes no longer than `stock` for one row of TIMED_TOKENS, on this device and now."""
    keys = [mx.random.key(seed) for seed in range(3)]
    q = mx.random.normal((1, TIMED_KV_HEADS * form.each, 1, form.dim), key=keys[0]).astype(form.queries)
    k, v = (mx.random.normal((1, TIMED_KV_HEADS, TIMED_TOKENS, form.dim), key=key).astype(form.scales) for key in keys[1:])
    k_side, v_side = sides(k, v, form.bits, form.group_size, TIMED_TOKENS)
    scale = form.dim**-0.5
    kernel = seconds(lambda: decode(q, k_side, v_side, scale, None, form.bits, form.group_size))
    return kernel <= seconds(lambda: stock(q, k_side, v_side, scale, form.bits, form.group_size))
