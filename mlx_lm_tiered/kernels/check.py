"""The self-test: a small random case through the kernel, against attention over dequantized keys and values in fp32. And whether it is fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from ..turboquant import codec
from .blocks import on_device
from .decode import Format, decode, decode_listed, decode_records, dialect
from .layout import Layout
from .tuning import Tuning, choose

SLOTS, CAPACITY, SPLITS = 301, 512, 2
# Of blocks: tokens of each row, all or fewer than are read at a time.
LENGTHS = (SLOTS, 7)
# Of the timing: about what a conversation has, and so many calls at once, as of a model's layers.
TIMED_TOKENS, TIMED_KV_HEADS, CALLS, REPEATS = 4096, 8, 8, 5
# Of the largest output, by the dtype of queries and so of outputs.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 2e-2}
# TurboQuant's values go into the product as halves, whatever the outputs are.
TURBO_TOLERANCE = 1e-3


def sides(keys: mx.array, values: mx.array, layout: Layout, slots: int) -> Any:
    """Both quantized, as views of `slots` tokens of larger buffers, as a cache hands them out."""
    if layout.turbo:
        made: Any = [codec.encode_keys(keys, layout.key_bits), codec.encode_values(values, layout.value_bits)]
    else:
        made = [mx.quantize(side, group_size=layout.group_size, bits=layout.key_bits) for side in (keys, values)]
    mx.eval(made)
    return [tuple(part[:, :, :slots] for part in side) for side in made]


def dequantized(keys: Any, values: Any, layout: Layout) -> list[mx.array]:
    """Both in fp32. The views are copied first: not every backend reads strided codes."""
    k, v = (tuple(mx.contiguous(part) for part in side) for side in (keys, values))
    if layout.turbo:
        return [codec.decode_keys(codec.Encoded(*k), layout.key_bits), codec.decode_values(codec.Encoded(*v), layout.value_bits)]
    return [mx.dequantize(s[0], s[1].astype(mx.float32), s[2].astype(mx.float32), group_size=layout.group_size, bits=layout.key_bits) for s in (k, v)]


def reference(queries: mx.array, keys: Any, values: Any, scale: float, mask: mx.array | None, layout: Layout) -> mx.array:
    """What the kernel should give, in fp32."""
    k, v = (mx.repeat(side, queries.shape[1] // side.shape[1], axis=1) for side in dequantized(keys, values, layout))
    scores = (queries.astype(mx.float32) * scale * k).sum(axis=-1)[:, :, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    # Sums rather than products of matrices, which some GPUs take in fewer bits.
    return (weights.swapaxes(-1, -2) * v).sum(axis=2, keepdims=True)


def _computed(form: Format) -> mx.Dtype:
    """The type that keys and values come in; TurboQuant's scales are fp16 whatever that is."""
    return form.queries if form.layout.turbo else form.scales


def error(form: Format, tuning: Tuning | None = None) -> float:
    """The largest error of the kernel for that format, relative to the largest output. Raises what mlx raises if it cannot be compiled or run."""
    rows, kv_heads = 2, 2
    keys = [mx.random.key(seed) for seed in range(3)]
    q = mx.random.normal((rows, 1, kv_heads * form.each, form.dim), key=keys[0]).astype(form.queries).swapaxes(1, 2)
    k, v = (mx.random.normal((rows, kv_heads, CAPACITY, form.dim), key=key).astype(_computed(form)) + 0.3 for key in keys[1:])
    k_side, v_side = sides(k, v, form.layout, SLOTS)
    mask = mx.arange(SLOTS) >= mx.array([3, 40]).reshape(2, 1, 1, 1) if form.masked else None
    if form.block:
        mask = mx.arange(SLOTS) < mx.array(LENGTHS).reshape(2, 1, 1, 1)
    # As it will be compiled; in so few splits that warps go round more than once.
    tuning = tuning or choose(SLOTS, rows * kv_heads, form.dim, form.each, dialect())._replace(splits=SPLITS)
    got = attention(form, q, k_side, v_side, mask, tuning)().astype(mx.float32)
    want = reference(q, k_side, v_side, form.scale, mask, form.layout)
    found: Any = (mx.abs(got - want).max() / mx.abs(want).max()).item()
    return found


def attention(form: Format, queries: mx.array, keys: Any, values: Any, mask: mx.array | None, tuning: Tuning | None = None) -> Callable[[], mx.array]:
    """A call of the kernel over planes, which are made records first where the form has these."""
    slots = keys[0].shape[2]
    if not form.records:
        return lambda: decode(queries, keys, values, form.scale, mask, form.layout, tuning)
    made = form.record.join(list(zip(keys, values, strict=True)))
    if form.block:
        lengths = LENGTHS if mask is not None else (slots,)
        held, table = scattered(made, lengths, form.block)
        counted = on_device(lengths)
        mx.eval(held, table, counted)
        return lambda: decode_listed(queries, held, form.record, table, counted, form.scale, form.block, max(lengths), tuning)
    # As a cache holds them: there is room behind.
    held = mx.concatenate([made, mx.zeros_like(made[:, :, :8])], axis=2)
    mx.eval(held)
    return lambda: decode_records(queries, held, form.record, slots, form.scale, mask, tuning)


def scattered(records: mx.array, lengths: Sequence[int], block: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Records (rows, heads, tokens, words) as blocks in any order among others, of which every number is NaN, and the table of each row's first tokens."""
    random = np.random.default_rng(seed)
    needed = [-(-n // block) for n in lengths]
    order = random.permutation(sum(needed) + 2)
    table = np.full((len(lengths), max(needed) + 1), order[-1], np.int32)
    rows, heads, tokens, words = records.shape
    places = np.full((len(order), block), rows * tokens, np.int64)
    for row, n in enumerate(lengths):
        table[row, : needed[row]] = mine = order[sum(needed[:row]) : sum(needed[: row + 1])]
        places[np.repeat(mine, block)[:n], np.arange(n) % block] = row * tokens + np.arange(n)
    nobody = mx.full((heads, 1, words), 0xFFFFFFFF, mx.uint32)
    every = mx.concatenate([records.swapaxes(0, 1).reshape(heads, -1, words), nobody], axis=1)
    return mx.contiguous(mx.take(every, mx.array(places.reshape(-1)), axis=1))[None], on_device(table)


def passes(form: Format) -> bool:
    """Whether the kernel is right. NaN is not."""
    return error(form) <= tolerance(form)


def tolerance(form: Format) -> float:
    """The largest error that is none, relative to the largest output."""
    return max(TOLERANCE[form.queries], TURBO_TOLERANCE if form.layout.turbo else 0.0)


def seconds(attend: Callable[[], mx.array]) -> float:
    """What CALLS of it take, evaluated at once: the median of REPEATS, after one that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        mx.eval([attend() for _ in range(CALLS)])
        times.append(time.perf_counter() - started)
    return median(times[1:])


def faster(form: Format, otherwise: Callable[[mx.array, Any, Any, float], mx.array]) -> bool:
    """Whether the kernel takes no longer than `otherwise` (queries, keys, values, scale) for one row of TIMED_TOKENS, on this device and now."""
    keys = [mx.random.key(seed) for seed in range(3)]
    q = mx.random.normal((1, TIMED_KV_HEADS * form.each, 1, form.dim), key=keys[0]).astype(form.queries)
    k, v = (mx.random.normal((1, TIMED_KV_HEADS, TIMED_TOKENS, form.dim), key=key).astype(_computed(form)) for key in keys[1:])
    k_side, v_side = sides(k, v, form.layout, TIMED_TOKENS)
    kernel = seconds(attention(form, q, k_side, v_side, None))
    return kernel <= seconds(lambda: otherwise(q + 0, k_side, v_side, form.scale))
