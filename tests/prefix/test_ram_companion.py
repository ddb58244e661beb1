"""Companion state in the RAM tier and in what stands before both tiers."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_lm_hooks import Companion, ModelSource
from mlx_lm_tiered.prefix.ram import RamTier
from mlx_lm_tiered.prefix.tiers import TieredPrefixCache
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.settings import Settings
from mlx_lm_tiered.statistics import Statistics

SOURCE = ModelSource(key="m")


def caches(tokens: int) -> list[KVCache]:
    cache = KVCache()
    values = mx.ones((1, 1, tokens, 4))
    cache.update_and_fetch(values, values)
    return [cache]


def tier() -> TieredPrefixCache:
    return TieredPrefixCache(RamTier(1 << 30), None, Statistics(), lambda source: source)


def draft(n: int) -> Companion:
    return Companion("draft", 1, {"n": n}, {"hidden": mx.zeros(1000)})


def test_it_is_served_at_its_boundary_only():
    prefixes = tier()
    prefixes.put(SOURCE, range(20), caches(20), companion=draft(20))
    assert prefixes.take(SOURCE, range(30)).companion.scalars == {"n": 20}
    shorter = prefixes.take(SOURCE, [*range(15), 99, 100])
    assert shorter.length == 15 and shorter.companion is None


def test_longer_entries_leave_it_and_it_is_counted():
    prefixes = tier()
    prefixes.put(SOURCE, range(20), caches(20), companion=draft(20))
    plain = sum(cache.nbytes for cache in caches(20))
    assert prefixes.nbytes == plain + 4000
    prefixes.put(SOURCE, range(40), caches(40))
    prefixes.put(SOURCE, range(20), caches(20))  # without: what is there has more
    assert len(prefixes) == 2
    assert prefixes.take(SOURCE, [*range(20), 99]).length == 20
    assert prefixes.take(SOURCE, [*range(20), 99]).companion.scalars == {"n": 20}
    prefixes.put(SOURCE, range(20), caches(20), companion=draft(21))
    assert prefixes.take(SOURCE, [*range(20), 99]).companion.scalars == {"n": 21}
    prefixes.put(SOURCE, range(60), caches(60), companion=draft(60))
    assert len(prefixes) == 2  # the plain entry of 40 gave way


def test_it_is_not_stored_with_fewer_tokens_than_it_belongs_to():
    prefixes = tier()
    prefixes.put(SOURCE, range(21), caches(20), companion=draft(21))
    assert prefixes.take(SOURCE, range(30)).companion is None


def test_it_comes_back_from_the_disk(tiny_llama, cache_dir):
    """Put into the RAM tier, saved at the end of one run, taken in another."""
    source = ModelSource(path=tiny_llama)
    for run in range(2):
        runtime = Runtime(Settings(ssd_cache=cache_dir, ssd_restore="always"))
        runtime.saves_itself = True
        prefixes = runtime.prefix_cache(None, None, "script")
        runtime.model_loaded(source)
        if run == 0:
            prefixes.put(source, range(100), caches(100), companion=draft(100))
        else:
            runtime.wait_indexed(source, 30)
            taken = prefixes.take(source, [*range(100), 99])
        runtime.close()
    assert taken.length == 100 and taken.companion.scalars == {"n": 100}
