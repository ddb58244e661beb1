"""The server's prompt cache over a plugin's prefix cache."""

from __future__ import annotations

import argparse
import logging

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.cache import LRUPromptCache as Upstream
from witness import Witness

from mlx_lm_hooks import Invocation
from mlx_lm_patches.host import host

KEY = ("model", None, None)


class Stand:
    """A cache class that no plugin knows."""

    def __init__(self, value: str, trimmable: bool = True):
        self.value = value
        self.trimmable = trimmable
        self.nbytes = len(value)

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> int:
        return n


def kv(n: int) -> list[KVCache]:
    cache = KVCache()
    keys = mx.arange(n, dtype=mx.float32).reshape(1, 1, n, 1)
    cache.update_and_fetch(keys, keys)
    return [cache]


@pytest.fixture
def make(witness):
    from mlx_lm.server import LRUPromptCache

    return LRUPromptCache


def test_it_is_a_kind_of_upstreams(make, witness):
    cache = make()
    make(max_size=3)
    make(4, max_bytes=100)
    assert isinstance(cache, Upstream) and (cache.max_size, cache.max_bytes) == (10, 1 << 63)
    sizes = [(e["max_entries"], e["max_bytes"]) for e in witness.named("prefix_cache")]
    assert sizes == [(None, None), (3, None), (4, 100)]


def test_take_leaves_one_token(make):
    cache = make()
    cache.insert_cache(KEY, [1, 2, 3], kv(3))
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2, 3])
    assert rest == [3] and caches[0].offset == 2
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2, 3, 4, 5])
    assert rest == [4, 5] and caches[0].offset == 3
    assert cache.fetch_nearest_cache(("other", None, None), [1, 2, 3]) == (None, [1, 2, 3])
    assert cache.fetch_nearest_cache(KEY, []) == (None, [])


def test_unknown_classes_are_kept_by_upstreams_storage(make, witness):
    cache = make(max_size=2)
    cache.insert_cache(KEY, [1, 2], [Stand("ab")], cache_type="user")
    assert witness.named("put") == [] and (len(cache), cache.nbytes) == (1, 2)
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2])
    assert (caches[0].value, rest) == ("ab", [])
    cache.insert_cache(KEY, [7, 8, 9], kv(3))
    assert len(cache) == 2 and cache.nbytes == 2 + cache._prefixes.nbytes
    stats = cache.stats_by_type()
    assert list(stats) == ["assistant", "user", "system"]
    assert stats["user"] == {"n_sequences": 1, "n_bytes": 2}
    assert stats["assistant"] == {"n_sequences": 1, "n_bytes": cache._prefixes.nbytes}


def test_the_longer_of_both_is_used(make):
    cache = make()
    cache.insert_cache(KEY, [1, 2, 3, 4], [Stand("abcd", trimmable=False)])
    cache.insert_cache(KEY, [1, 2], kv(2))
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2, 3, 4, 5])
    assert (type(caches[0]), rest) == (Stand, [5])
    cache.insert_cache(KEY, [1, 2, 3, 4, 5, 6], kv(6))
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2, 3, 4, 5, 6, 7])
    assert (type(caches[0]), rest) == (KVCache, [7])


def test_an_exact_hit_in_upstreams_storage_leaves_a_token_for_real_caches(make, monkeypatch):
    cache = make()
    monkeypatch.setattr(cache._prefixes, "owns", lambda caches: False)
    cache.insert_cache(KEY, [1, 2, 3], kv(3))
    caches, rest = cache.fetch_nearest_cache(KEY, [1, 2, 3])
    assert caches[0].offset + len(rest) == 3 and rest == [1, 2, 3][caches[0].offset :] and rest
    recurrent = ArraysCache(1)
    recurrent[0] = mx.zeros((1, 2))
    cache.insert_cache(KEY, [9], [recurrent])
    assert cache.fetch_nearest_cache(KEY, [9]) == (None, [9])


def test_trim_reaches_both(make):
    cache = make()
    cache.insert_cache(KEY, [1, 2], [Stand("ab")])
    cache.insert_cache(KEY, [5, 6, 7], kv(3))
    cache.trim_to(n_sequences=1)
    assert len(cache) == 1
    cache.trim_to(n_bytes=0)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_fault_is_a_miss_with_one_warning(make, witness, caplog):
    cache = make()
    cache.insert_cache(KEY, [1, 2, 3], kv(3))
    witness.prefixes[-1].fail = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cache.fetch_nearest_cache(KEY, [1, 2, 3]) == (None, [1, 2, 3])
        cache.insert_cache(KEY, [4, 5], kv(2))
        cache.trim_to(n_bytes=0)
    assert len([r for r in caplog.records if "taking a prefix" in r.message]) == 1


def test_a_taken_prefix_without_a_rest_is_a_fault(make, witness, monkeypatch):
    from mlx_lm_hooks import Taken

    cache = make()
    monkeypatch.setattr(witness.prefixes[-1], "take", lambda source, tokens: Taken(kv(3), 3))
    assert cache.fetch_nearest_cache(KEY, [1, 2, 3]) == (None, [1, 2, 3])


@pytest.mark.parametrize(("given", "entries"), [(frozenset(), None), (frozenset({"prompt_cache_size"}), 10)])
def test_the_server_passes_what_the_user_asked(given, entries):
    import mlx_lm.server

    plugin = Witness()
    args = argparse.Namespace(prompt_cache_size=10, prompt_cache_bytes=1000)
    host.activate(plugin.plugins(), Invocation("server", args, given))
    mlx_lm.server.LRUPromptCache(10)
    host.deactivate()
    assert plugin.named("prefix_cache") == [{"event": "prefix_cache", "max_entries": entries, "max_bytes": 1000, "serves": "server"}]
