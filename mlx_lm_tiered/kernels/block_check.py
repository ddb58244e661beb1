"""The self-test of the kernel over blocks: a small random case, against attention over gathered tokens in fp32. And whether it is fast."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from .blocks import Form, choose, decode, on_device, queries_of_a_block
from .check import TIMED_KV_HEADS, TIMED_TOKENS, TOLERANCE, seconds
from .decode import dialect
from .tuning import Tuning

KV_HEADS, SPLITS = 2, 3
# One token, some, and more than a round of all warps.
LENGTHS = (1, 40, 333)


def pools(form: Form, lengths: tuple[int, ...], kv_heads: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Arenas of random numbers, a table and lengths: the rows' blocks lie in any order, among others that hold NaN."""
    random = np.random.default_rng(seed)
    needed = [-(-n // form.block) for n in lengths]
    order = random.permutation(sum(needed) + 2)
    table = np.full((len(lengths), max(needed) + 1), order[-1], np.int32)
    nobody = np.ones((sum(needed) + 2, form.block), bool)
    for row, n in enumerate(lengths):
        mine = order[sum(needed[:row]) : sum(needed[: row + 1])]
        table[row, : needed[row]] = mine
        nobody[np.repeat(mine, form.block)[:n], np.arange(n) % form.block] = False
    hidden = mx.array(nobody)[:, None, :, None]
    shape = (len(nobody), kv_heads, form.block, form.dim)
    sides = [mx.where(hidden, mx.nan, mx.random.normal(shape, key=mx.random.key(seed + side)) + 0.3).astype(form.dtype) for side in (1, 2)]
    if form.heads_first:
        sides = [mx.contiguous(side.swapaxes(0, 1)).reshape(1, kv_heads, -1, form.dim) for side in sides]
    return sides[0], sides[1], on_device(table), on_device(list(lengths))


def gathered(form: Form, arena: mx.array, table: mx.array, tokens: int) -> mx.array:
    """The first `tokens` of each row's blocks, (rows, kv_heads, tokens, dim)."""
    listed = table[:, : -(-tokens // form.block)]
    if form.heads_first:
        found = arena.reshape(arena.shape[1], -1, form.block, form.dim)[:, listed].swapaxes(0, 1)
    else:
        found = arena[listed].swapaxes(1, 2)
    return found.reshape(listed.shape[0], found.shape[1], -1, form.dim)[:, :, :tokens]


def reference(form: Form, queries: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: tuple[int, ...]) -> mx.array:
    """What the kernel should give, in fp32. Sums rather than products of matrices, which some GPUs take in fewer bits."""
    out = []
    for row, n in enumerate(lengths):
        k, v = (mx.repeat(gathered(form, arena, table[row : row + 1], n).astype(mx.float32), form.each, axis=1) for arena in (keys, values))
        each = []
        for position in range(form.length):
            seen = n - form.length + position + 1
            if seen <= 0:
                each.append(mx.zeros((1, k.shape[1], 1, form.dim)))
                continue
            scores = (queries[row : row + 1, :, position, None].astype(mx.float32) * form.scale * k[:, :, :seen]).sum(axis=-1, keepdims=True)
            each.append((mx.softmax(scores, axis=2, precise=True) * v[:, :, :seen]).sum(axis=2, keepdims=True))
        out.append(mx.concatenate(each, axis=2))
    return mx.concatenate(out)


def error(form: Form, tuning: Tuning | None = None) -> float:
    """The largest error of the kernel for that form, relative to the largest output; NaN where it read what it should not. Raises what mlx raises if it cannot be run."""
    rows = len(LENGTHS)
    queries = mx.random.normal((rows, form.length, KV_HEADS * form.each, form.dim), key=mx.random.key(0)).astype(form.dtype).swapaxes(1, 2)
    keys, values, table, lengths = pools(form, LENGTHS, KV_HEADS)
    # As it will be compiled; in so few splits that warps go round more than once.
    units = rows * KV_HEADS * -(-form.shared // queries_of_a_block(form))
    tuning = tuning or choose(LENGTHS[-1], units, form, dialect())._replace(splits=SPLITS)
    got = decode(queries, keys, values, table, lengths, form.scale, form.block if form.heads_first else None, None, tuning).astype(mx.float32)
    want = reference(form, queries, keys, values, table, LENGTHS)
    found: Any = (mx.abs(got - want).max() / mx.abs(want).max()).item()
    return found


def right(form: Form) -> bool:
    """Whether the kernel is right. NaN is not."""
    return error(form) <= TOLERANCE[form.dtype]


def faster(form: Form) -> bool:
    """Whether the kernel takes no longer than gathering and mlx's own attention, for one row of TIMED_TOKENS, on this device and now."""
    queries = mx.random.normal((1, TIMED_KV_HEADS * form.each, form.length, form.dim), key=mx.random.key(0)).astype(form.dtype)
    keys, values, table, lengths = pools(form, (TIMED_TOKENS,), TIMED_KV_HEADS)
    mx.eval(queries, keys, values, table, lengths)
    block = form.block if form.heads_first else None

    def otherwise() -> mx.array:
        k, v = (gathered(form, arena, table, TIMED_TOKENS) for arena in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries + 0, k, v, scale=form.scale, mask="causal" if form.length > 1 else None)

    kernel = seconds(lambda: decode(queries, keys, values, table, lengths, form.scale, block, TIMED_TOKENS))
    return kernel <= seconds(otherwise)
