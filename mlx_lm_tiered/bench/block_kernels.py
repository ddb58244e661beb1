"""Decode attention over blocks of plain keys and values on a GPU: its self-test, and microseconds a step beside mlx's attention over a plain cache.

Timed as in `kernels.py`. Blocks lie in any order in their pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_lm_tiered.kernels import block_check, blocks
from mlx_lm_tiered.kernels.block_check import pools
from mlx_lm_tiered.kernels.blocks import Form
from mlx_lm_tiered.kernels.check import TOLERANCE
from mlx_lm_tiered.kernels.tuning import TOKENS, Tuning

from . import kernels, report
from .kernels import BEYOND_CACHE, DIM, HEADS, KV_HEADS, SCALE

CONTEXTS = (4096, 16384, 65536)
BLOCK = 256
BF16, FP16, FP32 = mx.bfloat16, mx.float16, mx.float32
# Rows of one batch, of which a padded one would hold the longest's tokens for each.
MIXED = (64, 128, 300, 700, 1500, 3000, 5000, 8192)
VERIFIED = 4
# Warps a block and resident blocks, each compiled; and splits.
SHAPES = ((2, 6), (4, 2), (4, 3), (4, 4), (8, 1))
SPLITS = (16, 24, 33, 41, 49, 66, 82, 99, 128)


def form_of(dim: int = DIM, each: int = HEADS // KV_HEADS, block: int = BLOCK, dtype: mx.Dtype = BF16, length: int = 1, heads_first: bool = False) -> Form:
    """What a model with such heads asks for."""
    return Form(dim, each, block, dtype, dim**-0.5, length, heads_first)


def forms() -> list[Form]:
    """Every head dimension, block, type, and kind of sharing, though not each with each."""
    return [
        form_of(), form_of(heads_first=True), form_of(block=1), form_of(block=16, each=1), form_of(block=32, each=8), form_of(block=64, each=16, dtype=FP16),
        form_of(block=128, each=2, dtype=FP32), form_of(64, 7, 16), form_of(64, 1, 1, FP32, heads_first=True), form_of(80, 1, 32), form_of(96, 3, 64, FP16),
        form_of(256, 2), form_of(256, 8, 16), form_of(256, 4, 64, FP32), form_of(length=VERIFIED), form_of(64, 2, 16, FP32, 8),
    ]  # fmt: skip


def self_test() -> list[dict[str, Any]]:
    """Every one of `forms`; the error's text where one does not compile or run."""
    rows = []
    for form in forms():
        started = time.perf_counter()
        try:
            found, text = block_check.error(form), ""
        except (RuntimeError, ValueError) as raised:
            found, text = float("nan"), str(raised)
        name = f"d {form.dim} x {form.each} block {form.block} {form.dtype} queries {form.length}{' heads first' if form.heads_first else ''}"
        rows.append({"form": name, "ok": found <= TOLERANCE[form.dtype], "error": found, "seconds": time.perf_counter() - started, "raised": text})
    return rows


def run(contexts: Sequence[int] = CONTEXTS) -> list[dict[str, Any]]:
    """The self-test, printed; and timings: one row, several of mixed lengths, and drafts to verify. `tb_s` counts the rows' own keys and values once."""
    tested = self_test()
    print(report.table(tested), flush=True)
    rows = []
    for tokens in contexts:
        plain = kernels.plain_caches(tokens)
        rows.append(_row(f"{tokens} plain, sdpa", tokens, lambda q, pair: mx.fast.scaled_dot_product_attention(q, *pair, scale=SCALE), plain))
        del plain
        rows.append(_row(f"{tokens} blocks", tokens, lambda q, pool, most=tokens: _attend(q, pool, most), _pools((tokens,))))
    rows.append(_row(f"{len(MIXED)} rows of {MIXED[0]} to {MIXED[-1]}", sum(MIXED), lambda q, pool: _attend(q, pool, MIXED[-1]), _pools(MIXED), len(MIXED)))
    rows.append(_row(f"16384 blocks, {VERIFIED} queries", 16384, lambda q, pool: _attend(q, pool, 16384), _pools((16384,)), length=VERIFIED))
    ok = all(row["ok"] for row in tested)
    return [{"ok": ok} | row for row in rows]


def sweep(contexts: Sequence[int] = CONTEXTS) -> list[dict[str, Any]]:
    """For each context every shape of a block of threads with its three best numbers of splits, best first; and its error in the self-test's case."""
    rows = []
    errors = {shape: block_check.error(form_of(), Tuning(shape[0], 3, shape[1])) for shape in SHAPES}
    for tokens in contexts:
        made, found = _pools((tokens,)), []
        for warps, resident in SHAPES:
            mine = []
            for splits in SPLITS:
                if splits * warps * TOKENS <= tokens:
                    tuning = Tuning(warps, splits, resident)
                    us, built = kernels.measure(partial(_attend, longest=tokens, tuning=tuning), made, repeats=5)
                    mine.append({"tokens": tokens, "us": us, "build_us": built, "warps": warps, "splits": splits, "resident": resident, "error": errors[warps, resident]})
            found += sorted(mine, key=lambda row: row["us"] - row["build_us"])[:3]
        rows += sorted(found, key=lambda row: row["us"] - row["build_us"])
    return rows


def _attend(q: mx.array, pool: Any, longest: int, tuning: Tuning | None = None) -> mx.array:
    keys, values, table, lengths = pool
    return blocks.decode(q, keys, values, table, lengths, SCALE, None, longest, tuning)


def _pools(lengths: tuple[int, ...]) -> list[Any]:
    """As many as exceed the GPU's cache together, 8 at most."""
    one = 2 * sum(lengths) * KV_HEADS * DIM * BF16.size
    made = [pools(form_of(), lengths, KV_HEADS, seed) for seed in range(max(1, min(8, -(-BEYOND_CACHE // one))))]
    mx.eval(made)
    return made


def _row(name: str, tokens: int, attend: Any, pairs: Sequence[Any], batch: int = 1, length: int = 1) -> dict[str, Any]:
    size = 2 * tokens * KV_HEADS * DIM * BF16.size
    try:
        us, built = kernels.measure(attend, pairs, batch=batch, length=length)
    except (RuntimeError, ValueError) as raised:
        return {"what": name, "us": None, "build_us": None, "tb_s": None, "raised": str(raised)[:200]}
    return {"what": name, "us": us, "build_us": built, "tb_s": size / us / 1e6, "raised": ""}
