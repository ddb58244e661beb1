"""Fault 23: what has left RAM and is not on disk yet is found all the same, until it is on disk or given up for good."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import mlx.core as mx
import pytest
from cold_helpers import grown, plain, same, wrapped

from mlx_lm_hooks import ModelSource
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered import storage
from mlx_lm_tiered.cold import feeding, writer
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.settings import Settings

WAIT = 20.0


class Run:
    """A runtime whose RAM tier has place for one entry, with this thread as its generation thread."""

    def __init__(self, model, directory, known=True, **settings):
        self.runtime = Runtime(Settings(ssd_cache=directory, prompt_cache_size=1, ssd_demote_idle=0, **settings))
        self.source = ModelSource(path=model)
        self.cache = self.runtime.prefix_cache(None, None, "server")
        if known:
            self.runtime.model_loaded(self.source)
            assert self.runtime.storage.identities.get(self.source, WAIT)

    def put(self, tokens, caches, role="assistant"):
        self.cache.put(self.source, list(tokens), caches, role=role)

    def evict(self):
        """Have something else take the one place."""
        self.put([9], plain(1))

    def take(self, tokens):
        before = self.hits()
        taken = self.cache.take(self.source, list(tokens))
        return taken, next((tier for tier, n in self.hits().items() if n > before[tier]), None)

    def hits(self):
        return self.runtime.report()["hits_by_tier"]

    def ssd(self, name):
        return self.runtime.report()["ssd"][name]

    def flush(self):
        return self.runtime.flush_on_this_thread(WAIT)


@pytest.fixture
def begin(tiny_llama, cache_dir):
    runs = []

    def start(**settings):
        runs.append(Run(tiny_llama, cache_dir, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.runtime.close()


def write_on(caches):
    """What a request does that goes on from them."""
    step = mx.full((1, 2, 1, 8), 7.0)
    mx.eval([cache.update_and_fetch(step, step) for cache in caches])


def test_what_waits_to_be_written_is_lent_and_written_all_the_same(begin, tiny_llama, cache_dir):
    run = begin()
    run.put(range(100), plain(100))
    run.evict()
    for tokens in ([*range(100), 200], [*range(60), 200]):
        taken, tier = run.take(tokens)
        assert (tier, taken.length) == ("queue", len(tokens) - 1)
        assert same(taken.caches, kinds.lend(plain(100), taken.length))
        write_on(taken.caches)  # the borrower's own from here on
    assert (run.ssd("pending_spills"), run.ssd("pending_snapshots")) == (1, 1) and run.ssd("pending_spill_bytes") > 0
    assert run.flush()
    assert run.ssd("pending_spills") == run.ssd("pending_spill_bytes") == 0
    taken, tier = run.take([*range(100), 200])
    assert tier == "ssd" and same(taken.caches, plain(100))


def test_what_is_being_written_is_lent(begin, monkeypatch):
    run = begin()
    entered, gate = threading.Event(), threading.Event()
    write_all = writer._write_all
    monkeypatch.setattr(writer, "_write_all", lambda *args: (entered.set(), gate.wait(WAIT), write_all(*args)))
    run.put(range(100), plain(100))
    run.evict()
    outcome = []
    flush = threading.Thread(target=lambda: outcome.append(run.runtime.flush(WAIT)))
    flush.start()
    while not entered.is_set():
        run.runtime.idle_turn()
    taken, tier = run.take([*range(100), 200])
    assert (tier, taken.length) == ("queue", 100)
    write_on(taken.caches)
    gate.set()
    while flush.is_alive():
        run.runtime.idle_turn()
    assert outcome[0]["durable"]
    taken, tier = run.take([*range(100), 200])
    assert tier == "ssd" and same(taken.caches, plain(100))


def test_what_waits_for_the_fingerprint_is_lent(begin, monkeypatch):
    run = begin(known=False)
    get = run.runtime.storage.identities.get
    monkeypatch.setattr(run.runtime.storage.identities, "get", lambda *_: None)
    monkeypatch.setattr(run.runtime.storage.identities, "pending", lambda *_: True)
    run.put(range(100), plain(100))
    run.put(range(300, 350), plain(50))
    run.evict()
    assert run.ssd("waiting_for_fingerprint") == 3 and run.ssd("pending") == 0
    taken, tier = run.take([*range(100), 200])
    assert (tier, taken.length) == ("queue", 100) and same(taken.caches, plain(100))
    assert run.take([*range(320, 350), 1]) == (None, None)
    monkeypatch.setattr(run.runtime.storage.identities, "get", get)
    assert run.flush() and run.ssd("waiting_for_fingerprint") == 0
    assert run.take([*range(100), 200])[1] == "ssd"


def test_the_longest_of_all_places_is_lent(begin):
    run = begin(ssd_queue=1 << 30)
    run.put(range(50), grown(50))
    assert run.flush()
    run.put(range(80), grown(80))
    run.put([*range(20), 7], plain(21))
    assert [run.take([*range(n), 900])[1] for n in (90, 60, 20)] == ["queue", "queue", "ram"]
    assert run.take([*range(20), 7, 900])[1] == "ram"


def test_a_state_that_no_longer_entry_serves_comes_back_to_ram(begin):
    run = begin()
    run.put(range(40), wrapped(40))
    run.evict()
    assert [run.take([*range(40), 5])[1] for _ in range(2)] == ["queue", "ram"]


@pytest.mark.parametrize("end", ["written", "dropped", "superseded", "failed", "closed"])
def test_what_left_the_queue_is_neither_found_nor_kept(begin, monkeypatch, end):
    run = begin(ssd_queue=1 if end == "dropped" else 1 << 30)
    caches = plain(200)
    alive = weakref.ref(caches[0])
    run.put(range(200), caches)
    del caches
    run.evict()
    if end == "written":
        assert run.flush()
    elif end == "dropped":
        run.put([8, 8], plain(2))
    elif end == "superseded":
        run.put(range(210), plain(210))
        run.evict()
    elif end == "failed":
        monkeypatch.setattr(feeding, "to_bytes", lambda array: 1 / 0)
        assert not run.flush()
    else:
        run.runtime.storage.queue.close()
    run.runtime.idle_turn()
    gc.collect()
    assert alive() is None
    taken, tier = run.take([*range(200), 900])
    assert tier == {"written": "ssd", "superseded": "queue"}.get(end)


def test_a_flush_retries_what_was_dropped_and_is_still_in_ram(begin):
    """Over the cap the oldest is dropped; the newest never. What only the queue had is lost, and no flush says otherwise until it is on disk."""
    run = begin(ssd_queue=1)
    run.cache.ram.max_entries = 3
    for start in (0, 1000, 2000):
        run.put(range(start, start + 50), plain(50, seed=start))
    assert (run.ssd("dropped"), run.ssd("pending"), run.ssd("pending_spills")) == (2, 1, 0)
    assert run.flush()
    assert run.ssd("entries") == 3 and run.ssd("undurable") == 0
    run.put(range(3000, 3050), plain(50))  # the oldest leaves RAM; it is on disk
    run.cache.ram.trim(0, None)
    assert run.ssd("pending_spills") == 1 and run.flush()
    run.put(range(4000, 4050), plain(50))
    run.cache.ram.trim(0, None)
    run.put(range(5000, 5050), plain(50))
    report = run.runtime.flush(0)
    assert not run.flush() and report["dropped"] == 1
    assert run.take([*range(4000, 4050), 1])[1] is None and run.take([*range(5000, 5050), 1])[1] == "ram"
    run.put(range(4000, 4060), plain(60))
    assert run.flush() and run.ssd("undurable") == 0


def test_tokens_offered_again_are_waited_for_by_a_flush_that_runs(begin):
    """Evicted while a flush goes on, an entry is offered once more: that does not make it younger than the flush."""
    run = begin()
    queue = run.runtime.storage.queue
    run.put(range(50), plain(50))
    reports = []
    flush = threading.Thread(target=lambda: reports.append(queue.flush(WAIT)))
    flush.start()
    while not queue._flushing:
        time.sleep(0.001)
    run.cache.ram.trim(0, None)
    assert run.ssd("offered") == 2 and run.ssd("pending") == 1
    while flush.is_alive():
        run.runtime.idle_turn()
    assert reports[0].durable and reports[0].entries == 1


def test_a_long_conversation_is_made_one_file_while_it_rests(begin, monkeypatch):
    made = storage.Compactor
    monkeypatch.setattr(storage, "Compactor", lambda store, busy: made(store, busy, every=0.05, resting=0.0, long=4))
    run = begin()
    for n in range(20, 160, 20):
        run.put(range(n), grown(n))
        assert run.flush()
    deadline = time.monotonic() + WAIT
    while (run.ssd("compacted") == 0 or run.ssd("longest_chain") >= 4) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.ssd("longest_chain") < 4 and run.ssd("compacted") > 0
    run.evict()
    taken, tier = run.take([*range(140), 900])
    assert tier == "ssd" and same(taken.caches, grown(140))


def test_what_was_given_up_without_a_fingerprint_counts_until_it_is_on_disk(begin, monkeypatch):
    run = begin(known=False, ssd_queue=1)
    pending = run.runtime.storage.identities.pending
    monkeypatch.setattr(run.runtime.storage.identities, "pending", lambda *_: True)
    get = run.runtime.storage.identities.get
    monkeypatch.setattr(run.runtime.storage.identities, "get", lambda *_: None)
    run.put(range(50), plain(50))
    run.evict()
    run.put([8, 8], plain(2))
    monkeypatch.setattr(run.runtime.storage.identities, "get", get)
    monkeypatch.setattr(run.runtime.storage.identities, "pending", pending)
    assert run.runtime.storage.identities.get(run.source, WAIT)
    assert not run.flush() and run.cache.unsaved.lost > 0
    for tokens in (range(60), [9, 1]):
        run.put(tokens, plain(len(tokens)))
        run.flush()
    assert run.flush() and run.cache.unsaved.lost == 0
