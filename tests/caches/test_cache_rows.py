"""A row merged without copying behaves as upstream's merge of it, whatever the batch does next."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cache_states import DIM, HEADS, STATES, advance, arrays, bits, fill, noise, tokens
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.schemes.caches import RotatingQuantizedKVCache
from mlx_lm_tiered.schemes.caches import QuantizedKVCache as OurQuantizedKVCache
from mlx_lm_tiered.schemes.lockstep import Lockstep
from mlx_lm_tiered.schemes.turbo import Pair, TurboQuantKVCache
from mlx_lm_tiered.turboquant.codec import Encoded, decode_keys, decode_values

SSM = ((1, 3, 8), mx.float32)
MERGEABLE = {
    "kv": KVCache,
    "rotating": lambda: RotatingKVCache(12),
    "rotating-keep": lambda: RotatingKVCache(12, keep=3),
    "rotating-wide": lambda: RotatingKVCache(300),
    "nested": lambda: CacheList(KVCache(), CacheList(RotatingKVCache(12), KVCache())),
    "hybrid": lambda: CacheList(ArraysCache(2), KVCache()),
    "arrays": lambda: ArraysCache(2),
    "affine": lambda: OurQuantizedKVCache(bits=4, group_size=32),
    "affine-rotating": lambda: RotatingQuantizedKVCache(12, bits=8, group_size=32),
    "affine-rotating-keep": lambda: RotatingQuantizedKVCache(12, 3, bits=8, group_size=64),
    "turbo": TurboQuantKVCache,
}
CHUNKS = st.lists(st.sampled_from([1, 1, 1, 3, 9, 20]), max_size=4)


def request(name: str, chunks: list[int], trim: int = 0) -> Any:
    cache = MERGEABLE[name]()
    for i, n in enumerate(chunks):
        advance(cache, n, seed=i)
    if trim and getattr(cache, "keys", None) is not None and cache.is_trimmable():
        cache.trim(min(trim, cache.offset - 1))
    return cache


def rows_of(cache: Any) -> int:
    while isinstance(cache, CacheList):
        cache = cache.caches[0]
    return cache.batch_size if isinstance(cache, ArraysCache) else cache.left_padding.shape[0]


def attend(cache: Any, n: int, seed: int) -> list:
    """One forward pass over `n` tokens: what attention gives, not what lies behind masks."""
    if isinstance(cache, CacheList):
        return [attend(c, n, seed + i) for i, c in enumerate(cache.caches)]
    if isinstance(cache, ArraysCache):
        return advance(cache, n, seed)
    rows = cache.left_padding.shape[0]
    mask = cache.make_mask(n, return_array=True)
    queries, new = noise(rows, HEADS, n, DIM, seed=seed), noise(rows, HEADS, n, DIM, seed=seed + 1)
    keys, values = cache.update_and_fetch(new, new)
    if isinstance(keys, Pair):
        keys, values = decode_keys(Encoded(*keys), keys.bits), decode_values(Encoded(*values), values.bits)
    elif isinstance(cache, Lockstep):
        keys, values = (mx.dequantize(*side, bits=cache.bits, group_size=cache.group_size) for side in (keys, values))
    return [bits(mask), bits(cache.offset), bits(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask))]


def apply(cache: Any, op: str, n: int, seed: int, name: str) -> list:
    rows = rows_of(cache)
    if op == "attend":
        return attend(cache, n, seed)
    if op == "padded" and n > 1:
        padding = [(i * 2 + 1) % n for i in range(rows)]
        cache.prepare(lengths=[n - p for p in padding], right_padding=padding)
        seen = attend(cache, n, seed)
        cache.finalize()
        return seen
    if op == "extend":
        other = request(name, [n, 1])
        cache.extend(type(other).merge([other]))
    if op == "filter" and rows > 1:
        cache.filter(mx.array([i for i in range(rows) if i != n % rows]))
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(MERGEABLE)),
    CHUNKS,
    st.integers(0, 4),
    st.lists(
        st.tuples(st.sampled_from(["attend", "attend", "padded", "extend", "filter"]), st.sampled_from([1, 1, 2, 5, 14])),
        min_size=1,
        max_size=7,
    ),
)
def test_every_following_step_is_upstreams(name: str, chunks: list[int], trim: int, operations):
    theirs = type(MERGEABLE[name]()).merge([request(name, chunks, trim)])
    merged = kinds.merge_row([request(name, chunks, trim)])
    assert merged is not None
    [ours] = merged
    assert type(ours) is type(theirs)
    for seed, (op, n) in enumerate(operations):
        assert apply(ours, op, n, 10 * seed, name) == apply(theirs, op, n, 10 * seed, name), op
        if chunks or any(op in ("attend", "extend") for op, _ in operations[: seed + 1]):
            for row in range(rows_of(theirs)):
                assert bits(ours.extract(row)) == bits(theirs.extract(row)), op


@pytest.mark.parametrize("name", STATES)
def test_none_where_upstream_cannot_merge(name: str):
    cache = STATES[name]()
    try:
        theirs = type(cache).merge([cache]) if hasattr(type(cache), "merge") and not name.startswith("batch") else None
    except (AttributeError, RuntimeError, StopIteration, ValueError):
        theirs = None
    before = bits(cache)
    merged = kinds.merge_row([cache])
    assert bits(cache) == before
    # Upstream takes a cache without its first slot for an empty one; that is left to it.
    assert (merged is None) == (theirs is None or name == "arrays-first-missing")
    if merged is not None:
        assert type(merged[0]) is type(theirs) and vars(merged[0]).keys() == vars(theirs).keys()


def test_one_that_cannot_be_merged_leaves_all_to_upstream():
    assert kinds.merge_row([fill(KVCache(), 3), STATES["quantized-8-bits"]()]) is None
    assert kinds.merge_row([CacheList(fill(KVCache(), 3), STATES["chunked"]())]) is None
    assert kinds.merge_row([arrays(SSM, None)]) is None


@pytest.mark.parametrize(("make", "batch"), [(KVCache, BatchKVCache), (lambda: RotatingKVCache(50_000), BatchRotatingKVCache)], ids=["kv", "rotating"])
def test_merging_and_the_next_step_copy_nothing(make, batch):
    n, one = 20_000, mx.ones((1, HEADS, 1, DIM))
    keys = mx.zeros((1, HEADS, n, DIM))
    cache = make()
    cache.update_and_fetch(keys, keys)
    cache.update_and_fetch(one, one)
    del keys
    mx.eval(cache.keys, cache.values)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    [row] = kinds.merge_row([cache])
    assert type(row) is batch
    row.update_and_fetch(one, one)
    mx.eval(row.keys, row.values)
    assert mx.get_peak_memory() - before < cache.nbytes // 20


def prefill(cache: Any, lengths: list[int], held: list[int], step: int) -> None:
    """As upstream's PromptProcessingBatch.prompt: `lengths` more tokens per row, padded on the right, `step` at a time."""
    longest = max(lengths)
    padded = [
        mx.concatenate([tokens(h, h + n), noise(1, HEADS, longest - n, DIM, seed=99)], axis=2) for h, n in zip(held, lengths, strict=True)
    ]
    batch = mx.concatenate(padded, axis=0)
    if min(lengths) < longest:
        cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
    for at in range(0, longest, step):
        cache.update_and_fetch(batch[:, :, at : at + step], batch[:, :, at : at + step])
    if min(lengths) < longest:
        cache.finalize()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([lambda: BatchRotatingKVCache(8, [0, 0, 0]), lambda: BatchKVCache([0, 0, 0])]),
    st.lists(st.tuples(*[st.integers(2, 24)] * 3), min_size=1, max_size=3),
    st.sampled_from([5, 8, 100]),
)
def test_a_cut_of_a_row_out_of_a_padded_batch_holds_its_first_tokens(make, segments, step):
    """Upstream's extract may have padding where a ring dropped tokens, in slots that say they hold them."""
    cache, held = make(), [0, 0, 0]
    # Upstream refuses a last chunk of one token while rows are padded.
    assume(all(max(lengths) % step != 1 for lengths in segments))
    for lengths in segments:
        prefill(cache, list(lengths), held, step)
        held = [h + n for h, n in zip(held, lengths, strict=True)]
    for row, length in enumerate(held):
        single = cache.extract(row)
        assert kinds.length([single]) == length
        for n in range(1, length):
            if kinds.can_cut([single], n):
                [cut] = kinds.lend([single], n)
                assert bits(cut.keys[..., :n, :]) == bits(tokens(0, n)), (row, n)
