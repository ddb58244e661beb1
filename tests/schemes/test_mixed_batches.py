"""A batch of plain and quantized rows under whatever happens to it: every row attends as it would alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_lm_tiered.schemes import attention
from mlx_lm_tiered.schemes.caches import QuantizedKVCache, RotatingQuantizedKVCache
from mlx_lm_tiered.schemes.convert import convert, convert_rows
from mlx_lm_tiered.schemes.mixed import MixedBatch, extend, rows_of
from mlx_lm_tiered.schemes.spec import Affine, Turbo
from mlx_lm_tiered.schemes.turbo import TurboQuantKVCache

HEADS, DIM, START = 2, 64, 11
AFFINE, TURBO = Affine(8, 32), Turbo(8, 4)
MAKE = {"full": (KVCache, AFFINE), "ring": (lambda: RotatingKVCache(8), AFFINE), "wide ring": (lambda: RotatingKVCache(14), AFFINE), "turbo": (KVCache, TURBO)}
attend = attention.build(base.quantized_scaled_dot_product_attention)


def noise(seed: int, n: int) -> mx.array:
    return mx.random.normal((1, HEADS, n, DIM), key=mx.random.key(seed))


def outputs(cache: Any, queries: mx.array, new: mx.array) -> mx.array:
    mask = cache.make_mask(queries.shape[2], window_size=None, return_array=True)
    keys, values = cache.update_and_fetch(new, -new)
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    return attend(queries, keys, values, 0.3, mask, 32, 8)


class Run:
    """The batch, and each of its rows alone."""

    def __init__(self, name: str):
        self.name = name
        make, self.form = MAKE[name]
        self.seed = 0
        self.alone: list[Any] = [make()]
        self.batch = [type(self.alone[0]).merge(self.alone)]

    def step(self, lengths: list[int]) -> None:
        """These many tokens more for each row, padded on the right."""
        longest = max(lengths)
        queries, new = [], []
        for row in range(len(lengths)):
            self.seed += 2
            queries.append(noise(self.seed, longest))
            new.append(noise(self.seed + 1, longest))
        padded = min(lengths) < longest
        [cache] = self.batch
        if padded:
            cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
        together = outputs(cache, mx.concatenate(queries), mx.concatenate(new))
        if padded:
            cache.finalize()
        for row, n in enumerate(lengths):
            single = outputs(self.alone[row], queries[row][:, :, :n], new[row][:, :, :n])
            assert mx.abs(together[row : row + 1, :, :n] - single).max() < 1e-4, (row, n)
        due = [row for row, cache in enumerate(self.alone) if cache.offset == START]
        convert_rows(self.batch, due, self.form)
        for row in due:
            assert convert([self.alone[row]], self.form, START) == 1

    def at_most(self, row: int, n: int) -> int:
        held = self.alone[row].offset
        return min(n, START - held) if held < START else n

    def join(self, chunks: list[int]) -> None:
        other = Run(self.name)
        other.seed = self.seed + 1000
        for n in chunks:
            other.step([other.at_most(0, n)])
        self.seed = other.seed
        self.batch = [extend(self.batch[0], other.batch[0])]
        self.alone += other.alone

    def leave(self, row: int) -> None:
        keep = [r for r in range(len(self.alone)) if r != row % len(self.alone)]
        if keep:
            self.batch[0].filter(keep)
            self.alone = [self.alone[r] for r in keep]

    def check(self) -> None:
        assert rows_of(self.batch[0]) == len(self.alone)
        for row, cache in enumerate(self.alone):
            if cache.offset == 0:
                continue  # which mlx-lm cannot extract from an empty batch
            mine = self.batch[0].extract(row)
            assert type(mine) is type(cache)
            assert mine.offset == cache.offset
            assert getattr(mine, "minimum_reusable_offset", 0) == getattr(cache, "minimum_reusable_offset", 0)


JOIN_OR_LEAVE = (
    st.tuples(st.just("join"), st.lists(st.integers(2, 9), max_size=3)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(MAKE)),
    st.lists(st.one_of(st.tuples(st.just("prefill"), st.lists(st.integers(1, 9), min_size=4, max_size=4)), *JOIN_OR_LEAVE), max_size=6),
    st.lists(st.one_of(st.tuples(st.just("decode"), st.integers(1, 4)), *JOIN_OR_LEAVE), max_size=6),
)
def test_rows_of_any_age_attend_as_alone(name, prefilling, decoding):
    """In the order that mlx-lm has: a batch that prefills, then one that decodes, each joined and left by others."""
    run = Run(name)
    for op, how in prefilling + decoding:
        if op == "decode":
            for _ in range(how):
                run.step([1] * len(run.alone))
        elif op == "prefill":
            lengths = [run.at_most(row, n) for row, n in zip(range(len(run.alone)), how, strict=False)]
            # A chunk of a single token comes from a row that reaches the start with it.
            if max(lengths) > 1 or any(cache.offset == START - 1 for cache in run.alone):
                run.step(lengths)
        elif op == "join" and len(run.alone) < 4:
            run.join(how)
        elif op == "leave":
            run.leave(how)
        run.check()


@pytest.mark.parametrize(("name", "quantized"), [("full", QuantizedKVCache), ("ring", RotatingQuantizedKVCache), ("turbo", TurboQuantKVCache)])
def test_the_conversion_moves_rows_one_at_a_time(name, quantized):
    run = Run(name)
    run.step([9])
    run.join([5])
    kinds = []
    for _ in range(8):
        run.step([1, 1])
        kinds.append([type(run.batch[0].extract(row)) is quantized for row in (0, 1)])
        mixed = isinstance(run.batch[0], MixedBatch) and len(run.batch[0].groups) == 2
        assert mixed == (kinds[-1] == [True, False])
    assert kinds == [[False, False]] + [[True, False]] * 4 + [[True, True]] * 3


@pytest.mark.parametrize("name", sorted(MAKE))
def test_rows_are_padded_after_their_conversion(name):
    """The parts of a converted batch have row arrays of their own, which mlx-lm adds to in place."""
    run = Run(name)
    run.step([5])
    run.join([9, 2])
    for lengths in ([2, 3], [4, 2], [3, 5]):
        run.step([run.at_most(row, n) for row, n in enumerate(lengths)])
        run.check()


@pytest.mark.parametrize("name", ["full", "turbo"])
def test_rows_that_converted_out_of_order_keep_their_places_when_others_join(name):
    run = Run(name)
    run.step([2])
    run.join([9, 2])
    run.step([9, 2])
    run.join([4, 7])
    run.step([1, 1, 1])
    run.leave(1)
    run.step([1, 1])
    run.check()


@pytest.mark.parametrize("form", [AFFINE, TURBO])
def test_a_row_that_joins_quantized_ones_has_the_models_type(form):
    """It is padded before its first token, in a type that TurboQuant's fp16 scales do not tell."""
    first = KVCache()
    first.update_and_fetch(noise(1, START).astype(mx.bfloat16), noise(2, START).astype(mx.bfloat16))
    assert convert([first], form, START) == 1
    batch = extend(type(first).merge([first]), KVCache.merge([KVCache()]))
    new = noise(3, 1).astype(mx.bfloat16)
    batch.update_and_fetch(mx.concatenate([new, new]), mx.concatenate([new, new]))
    joined = batch.extract(1)
    assert type(joined) is KVCache and joined.keys.dtype == joined.values.dtype == mx.bfloat16
    assert mx.array_equal(joined.keys, new)
