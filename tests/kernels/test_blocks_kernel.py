"""Decode attention over blocks in the dialects that run here, against attention over the gathered tokens in fp64."""

from __future__ import annotations

import block_dialects
import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_tiered.kernels.blocks import Form

BF16, FP16, FP32 = mx.bfloat16, mx.float16, mx.float32
# Every head dimension, block, type, and kind of sharing among query heads.
FORMS = [Form(64, 1, 16, FP32, 0.11), Form(128, 4, 64, FP32, 0.11), Form(256, 6, 1, FP32, 0.07, heads_first=True), Form(64, 2, 32, FP32, 0.11, 8)]
HALVES = [
    Form(128, 4, 256, BF16, 0.09), Form(128, 8, 32, BF16, 0.09), Form(64, 16, 1, BF16, 0.12), Form(80, 3, 16, BF16, 0.11),
    Form(96, 5, 128, FP16, 0.1), Form(256, 2, 16, FP16, 0.06), Form(256, 8, 5, BF16, 0.06),
    Form(64, 4, 16, FP16, 0.12, 3, heads_first=True),
]  # fmt: skip
LENGTHS = (0, 1, 16, 17, 77, 131, 300)
ROOM = 320

Library = block_dialects.Plain | block_dialects.Metal


@pytest.fixture(scope="module", params=[block_dialects.Plain, block_dialects.Metal], ids=["plain", "metal"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return request.param([*FORMS, *HALVES], tmp_path_factory.mktemp("blocks"))


def made(form: Form, lengths: tuple[int, ...], seed: int = 0) -> tuple[mx.array, mx.array, mx.array, np.ndarray, np.ndarray]:
    """Queries, arenas whose every number that no row holds is NaN, tables that name no block where a row has none, and lengths."""
    random = np.random.default_rng(seed)
    needed = [-(-n // form.block) for n in lengths]
    order = random.permutation(sum(needed) + 3)
    table = np.full((len(lengths), max(ROOM // form.block, max(needed)) + 1), 1 << 30, np.int32)
    arenas = [np.full((sum(needed) + 3, block_dialects.KV_HEADS, form.block, form.dim), np.nan, np.float32) for _ in range(2)]
    for row, n in enumerate(lengths):
        table[row, : needed[row]] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        for place in range(n):
            for arena in arenas:
                arena[table[row, place // form.block], :, place % form.block] = random.normal(0.3, 2, (block_dialects.KV_HEADS, form.dim))
    q = random.normal(size=(len(lengths), block_dialects.KV_HEADS * form.each, form.length, form.dim))
    if form.heads_first:
        arenas = [np.ascontiguousarray(arena.swapaxes(0, 1)).reshape(1, block_dialects.KV_HEADS, -1, form.dim) for arena in arenas]
    return mx.array(q, form.dtype), mx.array(arenas[0], form.dtype), mx.array(arenas[1], form.dtype), table, np.array(lengths, np.int32)


def expected(form: Form, q: mx.array, keys: mx.array, values: mx.array, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    queries, k, v = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (q, keys, values))
    if form.heads_first:
        k, v = (side.reshape(block_dialects.KV_HEADS, -1, form.block, form.dim).swapaxes(0, 1) for side in (k, v))
    out = np.zeros(q.shape)
    for row, n in enumerate(lengths):
        held = table[row, : -(-n // form.block)]
        mine = [np.repeat(side[held].swapaxes(0, 1).reshape(side.shape[1], -1, form.dim)[:, :n], form.each, axis=0) for side in (k, v)]
        if n:
            scores = queries[row] * form.scale @ mine[0].swapaxes(-1, -2)
            scores = np.where(np.arange(n) <= np.arange(n - form.length, n)[:, None], scores, -np.inf)
            # A query that is before the row's first token sees none.
            weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
            out[row] = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ mine[1]
    return out


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fp32_equals_attention_over_gathered_tokens(library: Library, form: Form) -> None:
    for seed, splits in enumerate((1, 3)):
        given = made(form, LENGTHS[3 * seed : 3 * seed + 4], seed)
        want = expected(form, *given)
        assert np.abs(library.decode(form, *given, splits) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("form", HALVES, ids=str)
def test_sixteen_bits_equal_it_to_their_last_place(library: Library, form: Form) -> None:
    half = 2.0**-8 if form.dtype == BF16 else 2.0**-11
    for seed, splits in enumerate((2, 5)):
        given = made(form, LENGTHS[3 * seed : 3 * seed + 4], seed)
        got, want = library.decode(form, *given, splits), expected(form, *given)
        # Half a unit of the output's type, and what comes of weights in two numbers of it.
        assert np.all(np.abs(got - want) <= np.abs(want) * half + 1e-4)
