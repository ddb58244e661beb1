"""Quantized caches at their edges: empty, copied, cut at the wrap, made from a state."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.schemes.caches import QuantizedKVCache, RotatingQuantizedKVCache
from mlx_lm_tiered.schemes.convert import convert, convert_rows
from mlx_lm_tiered.schemes.scheme import Scheme
from mlx_lm_tiered.schemes.spec import Affine, Turbo, parse
from mlx_lm_tiered.schemes.turbo import TurboQuantKVCache
from mlx_lm_tiered.statistics import Statistics

MAKE = {
    "full": lambda: QuantizedKVCache(bits=3, group_size=32),
    "ring": lambda: RotatingQuantizedKVCache(8, bits=3, group_size=32),
    "turbo": lambda: TurboQuantKVCache(value_bits=5),
}


def feed(cache: Any, *chunks: int) -> Any:
    for seed, n in enumerate(chunks):
        keys = mx.random.normal((1, 2, n, 64), key=mx.random.key(cache.offset * 100 + seed))
        cache.update_and_fetch(keys, -keys)
    return cache


def content(cache: Any) -> list[bytes]:
    return [np.array(side).tobytes() for part in cache.parts for side in (part.keys, part.values)]


@pytest.mark.parametrize("name", MAKE)
def test_merges_of_empty_caches_keep_the_scheme(name):
    make = MAKE[name]
    merged = make().merge([make(), make()])
    merged.filter([1])
    merged.extend(make().merge([make()]))
    merged.filter(mx.array([0, 1]))
    assert (merged.form, merged.bounds) == (make().form, [0, 0])
    merged.extend(make().merge([feed(make(), 5), make()]))
    assert merged.offset.tolist() == [0, 0, 5, 0]
    empty = merged.extract(3)
    assert kinds.length([empty]) is None and kinds.can_cut([empty], 0) and kinds.minimum_reusable([empty]) == 0
    assert content(feed(merged.extract(2), 1, 1)) == content(feed(make().merge([feed(make(), 5)]).extract(0), 1, 1))
    other = make()
    other.form = Affine(4, 32)
    with pytest.raises(ValueError, match="different schemes"):
        merged.extend(other.merge([other]))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, lambda cache: kinds.lend([cache])[0]], ids=["copy", "deepcopy", "lend"])
@pytest.mark.parametrize("name", MAKE)
def test_what_a_copy_takes_does_not_come_to_the_original(name, take):
    cache = feed(MAKE[name](), 5, 1, 1, 1, 1, 1)  # a ring of 8 in the middle of its round
    before, offset = content(cache), cache.offset
    other = take(cache)
    assert content(other) == before and other.offset == offset
    feed(other, 1, 3)
    assert (content(cache), cache.offset) == (before, offset) and other.offset == offset + 4


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("tokens", [6, 7, 8, 9])
def test_a_ring_is_cut_at_its_wrap_as_mlx_lms(tokens, cut):
    ours, theirs = RotatingQuantizedKVCache(8, bits=8, group_size=32), RotatingKVCache(8)
    for cache in (ours, theirs):
        feed(cache, *[1] * tokens)
        if cache.is_trimmable():
            assert cache.trim(cut) == cut
        feed(cache, 1, 2)
    assert (ours.offset, ours._idx, tokens < 8) == (theirs.offset, theirs._idx, ours.offset == tokens + 3 - cut)
    keys = mx.dequantize(*ours.keys_and_values()[0], group_size=32, bits=8)
    assert mx.abs(keys - theirs.keys_and_values()[0]).max() < 0.02


@pytest.mark.parametrize(("make", "form"), [(KVCache, Affine(4, 32)), (lambda: RotatingKVCache(32), Affine(4, 32)), (KVCache, Turbo(8, 3))], ids=["full", "ring", "turbo"])
def test_the_minimum_reusable_offset_goes_along(make, form):
    cache = feed(make(), 12)
    assert convert([cache], form, 12) == 1
    feed(cache, 3)
    taken = [copy.copy(cache), copy.deepcopy(cache), type(cache).from_state(cache.state), kinds.lend([cache])[0], cache.merge([cache]).extract(0)]
    batch = cache.merge([cache, cache])
    taken += [type(batch).from_state(batch.state).extract(1), copy.copy(batch).extract(0), copy.deepcopy(batch).extract(1)]
    for one in taken:
        assert one.form == form and getattr(one, "element", None) == getattr(cache, "element", None)
        assert one.minimum_reusable_offset == kinds.minimum_reusable([one]) == 12
        assert kinds.can_cut([one], 12) and not kinds.can_cut([one], 11)
    # Cut below it by someone else, it may only be used whole.
    cache.trim(10)
    assert kinds.can_cut([cache], 5) and not kinds.can_cut([cache], 4)


LAYERS, TOKENS = 8, 2048


def peak_of(act: Any) -> int:
    """Bytes that were in use at once beside what was before. `act` returns what is to be computed."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(act())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize(
    ("make", "form"), [(KVCache, Affine(8, 32)), (lambda: RotatingKVCache(TOKENS), Affine(8, 32)), (KVCache, Turbo(4, 5))], ids=["full", "ring", "turbo"]
)
@pytest.mark.parametrize("rows", [False, True], ids=["request", "rows"])
def test_a_conversion_takes_no_more_than_one_layer_at_a_time(monkeypatch, make, form, rows):
    """In the middle of a prefill there is no room for the quantized form of all layers beside their source, nor for what encoding one takes."""
    monkeypatch.setattr("mlx_lm_tiered.schemes.convert.PIECE", 1 << 15)
    caches = [feed(make(), TOKENS) for _ in range(LAYERS)]
    if rows:
        caches = [cache.merge([cache, cache]) for cache in caches]
    mx.eval([cache.state for cache in caches])
    layer = caches[0].nbytes
    held = LAYERS * layer

    def act() -> list[Any]:
        convert_rows(caches, [0, 1], form) if rows else convert(caches, form, TOKENS)
        return [cache.state for cache in caches]

    grown = peak_of(act)
    assert grown < 1.2 * layer
    assert sum(cache.nbytes for cache in caches) < 0.35 * held


@pytest.mark.parametrize("text", ["affine:4:32@9", "turbo@9"])
def test_what_a_cache_was_before_it_was_quantized_is_known(text):
    """Stored caches of a scheme with a start take the place of plain ones (`mlx_lm_patches`)."""
    scheme = Scheme(parse(text), Statistics())
    caches = [feed(KVCache(), 12), feed(RotatingKVCache(8), 12), KVCache(), ArraysCache(2)]
    before = [type(cache) for cache in caches]
    scheme.convert(caches)
    assert type(caches[0]) is not KVCache
    assert [scheme.plain_class(cache) for cache in caches] == before
