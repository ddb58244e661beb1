"""The RAM tier and the take and put above it, with real caches of a tiny model and no SSD tier."""

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_lm_hooks import ModelSource, Taken
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold.catalog import Found
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.prefix import ssd as ssd_tier
from mlx_lm_tiered.prefix.ram import Entry, RamTier, usable_length
from mlx_lm_tiered.prefix.tiers import TieredPrefixCache
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.settings import Settings
from mlx_lm_tiered.statistics import Statistics

SOURCE = ModelSource(key="model")


def plain(n, layers=2, heads=1, dim=4, start=0):
    """Caches that hold the tokens start, start + 1, … as their own keys."""
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        if n:
            x = (mx.arange(start, start + n, dtype=mx.float32).reshape(1, 1, n, 1)) * mx.ones((1, heads, n, dim))
            cache.update_and_fetch(x, x)
    return caches


def tier(max_bytes=10**9, max_entries=None):
    statistics = Statistics()
    ram = RamTier(max_bytes, max_entries)
    return TieredPrefixCache(ram, None, statistics, lambda source: source), statistics


def content(caches):
    return [np.array(a).tobytes() for c in caches for a in c.keys_and_values()]


def test_take_leaves_a_token_and_lends_without_touching_the_donor():
    cache, statistics = tier()
    caches = plain(10)
    before = content(caches)
    cache.put(SOURCE, list(range(10)), caches)
    taken = cache.take(SOURCE, list(range(10)))
    assert taken.length == 9
    for c in taken.caches:
        c.update_and_fetch(mx.full((1, 1, 1, 4), 77.0), mx.full((1, 1, 1, 4), 77.0))
    longer = cache.take(SOURCE, [*range(10), 50])
    assert longer.length == 10 and content(longer.caches) == before
    assert statistics.report()["hits_by_tier"]["ram"] == 2


def test_a_lookup_of_one_token_or_none_is_a_miss():
    cache, _ = tier()
    cache.put(SOURCE, [1], plain(1))
    assert cache.take(SOURCE, [1]) is None
    assert cache.take(SOURCE, []) is None
    assert cache.take(SOURCE, [1, 2]).length == 1  # fault 7: a 1-token prefix is matched


def test_hits_do_not_copy():
    """Fault 8: a hit costs no memory until the borrower writes."""
    cache, _ = tier()
    caches = plain(4096, layers=4, heads=8, dim=32)
    mx.eval([c.state[:2] for c in caches])
    size = kinds.nbytes(caches)
    cache.put(SOURCE, list(range(4096)), caches)
    del caches
    mx.clear_cache()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    taken = cache.take(SOURCE, [*range(4096), 1])
    mx.eval([c.state[:2] for c in taken.caches])
    assert mx.get_peak_memory() - active < size / 20


def test_recency_decides_who_leaves():
    """Fault 7: hits refresh recency."""
    cache, _ = tier(max_entries=2)
    cache.put(SOURCE, [1, 2, 3], plain(3))
    cache.put(SOURCE, [4, 5, 6], plain(3))
    assert cache.take(SOURCE, [1, 2, 3, 9])
    cache.put(SOURCE, [7, 8, 9], plain(3))
    assert cache.take(SOURCE, [1, 2, 3, 9])
    assert cache.take(SOURCE, [4, 5, 6, 9]) is None


def test_the_byte_cap_holds_and_counts_what_is_there():
    size = kinds.nbytes(plain(3))
    cache, _ = tier(max_bytes=3 * size)
    for i in range(10):
        cache.put(SOURCE, [i, 1, 2], plain(3))
        assert cache.nbytes == sum(e.nbytes for e in cache.ram) <= 3 * size
    assert len(cache) == 3 and cache.ram.evictions == 7
    cache.trim(max_bytes=size)
    assert len(cache) == 1
    cache.trim(max_entries=0)
    assert len(cache) == 0 and cache.nbytes == 0


def test_an_entry_over_the_cap_is_not_stored_and_evicts_nothing():
    size = kinds.nbytes(plain(3))
    cache, statistics = tier(max_bytes=size)
    cache.put(SOURCE, [1, 2, 3], plain(3))
    cache.put(SOURCE, list(range(600)), plain(600))
    assert len(cache) == 1 and statistics.report()["larger_than_ram_tier"] == 1


def test_a_longer_entry_supersedes_its_prefixes():
    cache, _ = tier()
    cache.put(SOURCE, [1, 2], plain(2))
    cache.put(SOURCE, [1, 2, 3], plain(3))
    cache.put(SOURCE, [1, 2, 3], plain(3))
    assert len(cache) == 1
    cache.put(SOURCE, [1, 2], plain(2))  # what is there serves it
    assert len(cache) == 1


def test_namespaces_do_not_mix():
    cache, _ = tier()
    cache.put(SOURCE, [1, 2, 3], plain(3))
    assert cache.take(ModelSource(key="other"), [1, 2, 3, 4]) is None


def test_a_partial_prefix_is_cut():
    cache, _ = tier()
    cache.put(SOURCE, [1, 2, 3, 4, 5], plain(5))
    taken = cache.take(SOURCE, [1, 2, 3, 9, 9])
    assert taken.length == 3
    assert content(taken.caches) == content(plain(3))


def test_key_length_is_cache_offset():
    """Fault 2's door: a key one longer than its cache is stored under what the cache holds."""
    cache, statistics = tier()
    cache.put(SOURCE, [1, 2, 3, 4], plain(3))
    assert cache.take(SOURCE, [1, 2, 3, 4, 5]).length == 3
    assert statistics.report()["keys_shortened"] == 1


def test_caches_of_different_lengths_are_cut_to_the_shortest():
    cache, _ = tier()
    cache.put(SOURCE, [1, 2, 3, 4], [*plain(4), *plain(3)])
    taken = cache.take(SOURCE, [1, 2, 3, 4, 5])
    assert taken.length == 3 and {c.offset for c in taken.caches} == {3}


def test_a_cache_that_cannot_be_cut_to_its_key_is_refused():
    from mlx_lm.models.cache import RotatingKVCache

    cache, statistics = tier()
    ring = RotatingKVCache(4)
    for _ in range(7):
        ring.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
    cache.put(SOURCE, [1, 2, 3, 4, 5, 6], [ring])
    assert len(cache) == 0 and statistics.report()["faults"] == {"length_mismatch": 1}


def test_an_unknown_class_is_left_to_upstream(caplog):
    class Strange:
        pass

    cache, statistics = tier()
    assert not cache.owns([Strange()]) and not cache.owns([Strange()])
    assert cache.owns(plain(1))
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert statistics.report()["faults"]["unknown_cache_class"] == 2


def test_a_fault_inside_is_a_miss(monkeypatch):
    cache, statistics = tier()
    cache.put(SOURCE, [1, 2, 3], plain(3))
    monkeypatch.setattr(kinds, "lend", lambda *a: 1 / 0)
    assert cache.take(SOURCE, [1, 2, 3, 4]) is None
    cache.snapshot(ModelSource(key="k", kv_scheme="affine:8:64@0"), [1, 2, 3], plain(3))
    report = statistics.report()
    assert report["faults"] == {"take": 1, "put": 1} and report["misses"] == 1


@pytest.mark.parametrize(
    ("tokens", "common", "length", "expected"),
    [
        ([1, -5, -5, -5, 2, 3], 4, 9, 4),  # after the image
        ([1, -5, -5, -5, 2, 3], 3, 9, 1),  # inside it: back to before it
        ([1, -5, -5, -5], 4, 9, 1),  # the last token is part of it
        ([-5, -5, 3], 1, 9, 0),
        ([1, -5, -6, 3], 2, 9, 2),  # between two images
        ([1, 2, 3], 3, 3, 2),
        ([1, 2, 3, 4], 3, 3, 3),
    ],
)
def test_usable_length_never_splits_an_image(tokens, common, length, expected):
    assert usable_length(tokens, common, length, lambda n: True) == expected


def test_uncuttable_entries_serve_whole_or_not_at_all():
    assert usable_length([1, 2, 3, 4], 3, 3, lambda n: False) == 3
    assert usable_length([1, 2, 3, 4], 3, 5, lambda n: False) == 0


def prefill(model, tokens):
    caches = make_prompt_cache(model)
    for _ in generate_step(mx.array(tokens), model, max_tokens=0, prompt_cache=caches):
        pass
    return caches


def test_hybrid_keeps_its_boundary(tiny_lfm2):
    """Recurrent layers cannot be cut: the longer entry leaves the boundary entry where it is."""
    model, _ = load(str(tiny_lfm2))
    cache, _ = tier()
    tokens = [5 + i % 90 for i in range(80)]
    boundary = prefill(model, tokens[:60])
    cache.snapshot(SOURCE, tokens[:60], boundary)
    cache.put(SOURCE, tokens, prefill(model, tokens))
    assert len(cache) == 2
    assert cache.take(SOURCE, tokens).length == 60
    assert cache.take(SOURCE, [*tokens[:60], 3, 4]).length == 60
    assert cache.take(SOURCE, [*tokens[:59], 3, 4]) is None
    assert cache.take(SOURCE, [*tokens, 4]).length == 80


def test_dense_needs_no_boundary(tiny_llama):
    model, _ = load(str(tiny_llama))
    cache, _ = tier()
    cache.snapshot(SOURCE, list(range(20)), prefill(model, list(range(20))))
    assert len(cache) == 0


def test_entry_knows_its_bytes():
    caches = plain(3)
    assert Entry("n", SOURCE, token_key([1, 2, 3]), 3, caches, "user").nbytes == sum(c.nbytes for c in caches)


def test_prefixes_below_the_minimum_are_not_reused():
    ram = RamTier(10**9)
    statistics = Statistics()
    cache = TieredPrefixCache(ram, None, statistics, lambda source: source, min_tokens=4)
    cache.put(SOURCE, [1, 2, 3, 4, 5], plain(5))
    assert cache.take(SOURCE, [1, 2, 3, 9]) is None
    assert cache.take(SOURCE, [1, 2, 3, 4, 9]).length == 4
    assert statistics.report()["hits"] == 1


@pytest.mark.parametrize(("serves", "least"), [("server", 1), ("script", 64)])
def test_generations_of_scripts_reuse_long_prefixes_only(serves, least):
    """A prompt cache that a script makes is one that the script means to reuse from, like a server's."""
    cache = Runtime(Settings()).prefix_cache(None, None, serves)
    cache.put(SOURCE, list(range(100)), plain(100))
    assert cache.take(SOURCE, [*range(least), 1000]).length == least
    assert cache.take(SOURCE, [*range(least - 1), 1000]) is None


class Unidentified:
    """The SSD tier while the weights are being hashed: it takes nothing yet."""

    known = False

    def __init__(self):
        self.offered = []

    def take(self, *_):
        return None

    def waiting(self, *_):
        return None

    def closest(self, *_):
        return None

    def covers(self, entry):
        return entry in self.offered

    def offer(self, entry, kept):
        if self.known:
            self.offered.append(entry)
        return self.known


def unidentified(max_unsaved_bytes):
    size = kinds.nbytes(plain(3))
    ssd = Unidentified()
    cache = TieredPrefixCache(RamTier(3 * size), ssd, Statistics(), lambda source: source, max_unsaved_bytes=max_unsaved_bytes * size)
    return cache, ssd


@pytest.mark.parametrize("in_ram", (True, False))
def test_what_made_room_for_a_restored_prefix_that_did_not_fit_is_not_lent(in_ram):
    cache, ssd = unidentified(5)
    cache.put(SOURCE, [1, 2, 3], plain(3))
    if not in_ram:
        cache.trim(max_entries=0)
        assert len(cache.ram) == 0 and cache.entries(), "it waits to be written"
    ssd.take = lambda *_: Taken(plain(4), 4)
    ssd.decided = lambda *_: None

    def no_room(source, caches, lender):
        for entry in cache.entries():
            cache.release(entry)

    cache.adopted = no_room
    assert cache.take(SOURCE, [1, 2, 3, 4, 5]) is None
    assert cache._statistics.report()["faults"] == {}


def test_a_conversation_waits_for_the_fingerprint_once():
    cache, ssd = unidentified(100)
    for n in range(3, 100):
        cache.put(SOURCE, list(range(n)), plain(n))
    ssd.known = True
    while cache.idle_turn():
        pass
    assert [entry.length for entry in ssd.offered] == [99]
    assert [e for e in cache.entries() if not ssd.covers(e)] == [] and cache.unsaved.lost == 0


def test_what_waits_for_the_fingerprint_is_bounded_and_what_was_given_up_counted():
    cache, ssd = unidentified(5)
    for i in range(20):
        cache.put(SOURCE, [i, 1, 2], plain(3))
    ssd.known = True
    while cache.idle_turn():
        pass
    assert len(ssd.offered) == 5
    # Those still in the RAM tier are not lost: a flush offers them.
    assert cache.unsaved.lost == 20 - 5 - len([e for e in cache.entries() if not ssd.covers(e)]) >= 12


def test_what_was_decided_for_a_draft_model_is_no_requests_decision():
    """Both look for the same tokens."""

    class Identities:
        def get(self, source, timeout):
            return Identity(source.path.name)

    class Cold:
        length, nbytes, parent = 3, 100, None
        chain = property(lambda self: [self])

        def serves(self, length):
            return length == 3

    class Store:
        def find(self, fingerprint, namespace, key, limit):
            return Found(Cold(), 3)

        def namespaces(self, fingerprint):
            return []

    tokens = [1, 2, 3, 4]
    key, model, draft = token_key(tokens), ModelSource(path=Path("model")), ModelSource(path=Path("draft"))
    tier = ssd_tier.SsdTier(Store(), None, Identities(), Statistics())
    assert tier.locate(draft, tokens, key, 0) is not None
    assert tier.decided(model, key, True) is None and tier.chooser.stats()["decisions"]["restored"] == 0
    assert tier.locate(model, tokens, key, 0) is not None
    assert tier.decided(model, key, True) is not None and tier.chooser.stats()["decisions"]["restored"] == 1


def test_requests_wait_for_a_slow_fingerprint_once(monkeypatch):
    """Ten seconds in all, not each: no row decodes while a request waits."""
    monkeypatch.setattr(ssd_tier, "PATIENCE", 0.2)
    waits = []

    class Hashing:
        def get(self, source, timeout):
            waits.append(timeout)
            threading.Event().wait(timeout)

    tier = ssd_tier.SsdTier(None, None, Hashing(), Statistics())
    source = ModelSource(path=Path("model"))
    for _ in range(3):
        assert tier.take(source, [1, 2], token_key([1, 2]), 0) is None
    assert waits == [0.2, 0.0, 0.0]
    other = ModelSource(path=Path("other"))
    assert tier.take(other, [1, 2], token_key([1, 2]), 0) is None
    assert waits[-1] == 0.2
