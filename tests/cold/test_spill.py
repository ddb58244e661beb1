"""Write-behind: one tensor a turn, never in the way, never a false promise, no memory kept."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
import weakref

import mlx.core as mx
import pytest
from cold_helpers import FINGERPRINT, flush, job, plain, restore, same, scanned, wrapped

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold import feeding, writer
from mlx_lm_tiered.cold.spill import SpillQueue
from mlx_lm_tiered.index.keys import token_key


class Engine:
    """Stands in for the server's loop: busy or not, and woken how often."""

    def __init__(self):
        self.busy = False
        self.woken = threading.Event()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def make(tmp_path, engine):
    queues = []

    def build(store=None, **options):
        store = store or scanned(tmp_path / "c")
        options = {"debounce": 0.0, **options}
        queue = SpillQueue(store, lambda: engine.busy, wake=engine.woken.set, **options)
        queues.append(queue)
        return store, queue

    yield build
    for queue in queues:
        assert queue.close(5.0)


def wait_until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def drain(queue):
    """Idle turns until nothing is left to do."""
    wait_until(lambda: not queue.turn() and queue.stats()["pending"] == 0)


def test_what_is_offered_is_on_disk_after_a_flush(make):
    store, queue = make()
    caches = plain(100)
    queue.offer(job(range(100), kinds.lend(caches)))
    queue.offer(job(range(500, 560), wrapped(60)))
    result = flush(queue)
    assert result.durable and (result.pending, result.dropped, result.failed) == (0, 0, 0)
    assert (result.entries, result.longest_durable_prefix) == (2, 100)
    again = scanned(store.root)
    assert same(restore(again, range(100)), caches)
    assert restore(again, range(500, 560)) is not None
    assert flush(queue).durable


def test_a_turn_handles_one_tensor(make, monkeypatch):
    _, queue = make()
    converted = []
    to_bytes = feeding.to_bytes
    monkeypatch.setattr(feeding, "to_bytes", lambda array: converted.append(array.shape) or to_bytes(array))
    queue.offer(job(range(50), plain(50, layers=6)))
    wait_until(lambda: queue.stats()["pending"] == 1)
    counts = []
    while queue.stats()["pending"]:
        before = len(converted)
        if not queue.turn():
            time.sleep(0.001)
        counts.append(len(converted) - before)
    assert max(counts) == 1 and sum(counts) == 12


def test_turns_never_wait_for_the_writer_which_asks_for_more_when_it_has_room(make, engine, monkeypatch):
    _, queue = make()
    gate = threading.Event()
    write_all = writer._write_all
    monkeypatch.setattr(writer, "_write_all", lambda *args: (gate.wait(10), write_all(*args)))
    queue.offer(job(range(50), plain(50, layers=6)))
    longest, taken = 0.0, 0
    for _ in range(50):
        started = time.perf_counter()
        taken += queue.turn()
        longest = max(longest, time.perf_counter() - started)
    assert taken <= 3 and longest < 1.0
    engine.woken.clear()
    gate.set()
    assert engine.woken.wait(5)
    drain(queue)


def test_nothing_is_written_while_the_engine_is_busy_until_a_flush(make, engine, monkeypatch):
    store, queue = make()
    written = []
    write_all = writer._write_all
    monkeypatch.setattr(writer, "_write_all", lambda fd, data, at: (written.append(len(data)), write_all(fd, data, at)))
    queue.offer(job(range(50)))
    engine.busy = True
    while queue.turn():
        pass
    time.sleep(0.1)
    assert written == []
    engine.busy = False
    wait_until(lambda: written)
    drain(queue)
    queue.offer(job(range(100, 150)))
    engine.busy = True
    assert flush(queue).durable


def test_large_tensors_are_written_in_pieces_with_a_pause_when_a_request_comes(make, engine, monkeypatch):
    _, queue = make()
    sizes = []
    write_all = writer._write_all

    def watched(fd, data, at):
        sizes.append(len(data))
        write_all(fd, data, at)
        if len(sizes) == 4:
            engine.busy = True

    monkeypatch.setattr(writer, "_write_all", watched)
    queue.offer(job(range(20_000), plain(20_000, layers=1, dim=64)))
    while queue.turn():
        pass
    wait_until(lambda: engine.busy)
    time.sleep(0.1)
    assert len(sizes) == 4 and max(sizes) <= 1 << 20
    engine.busy = False
    drain(queue)
    assert len(sizes) > 10


def test_debounce_waits_and_then_asks_for_turns(make, engine):
    _, queue = make(debounce=0.15)
    queue.offer(job(range(50)))
    assert not queue.turn()
    engine.woken.clear()
    assert engine.woken.wait(5)
    wait_until(queue.turn)
    drain(queue)


def test_a_flush_does_not_wait_for_the_debounce(make):
    _, queue = make(debounce=1000.0)
    queue.offer(job(range(50)))
    assert flush(queue).durable


def test_queued_entries_give_way_to_those_that_serve_them(make):
    store, queue = make(debounce=1000.0)
    for n in (10, 20, 30):
        queue.offer(job(range(n)))
    queue.offer(job(range(30)))
    queue.offer(job(range(20)))
    ring = wrapped(40)
    queue.offer(job([7, *range(39)], wrapped(40)))
    queue.offer(job([7, *range(47)], wrapped(48)))
    queue.offer(job([7, *range(39)], ring))
    assert queue.stats()["pending"] == 3
    result = flush(queue)
    assert result.durable and result.entries == 3
    assert store.covers(FINGERPRINT, "", token_key(range(10)))


def test_over_the_cap_the_oldest_goes_and_the_newest_never(make):
    store, queue = make(debounce=1000.0, max_bytes=1)
    queue.offer(job(range(100, 150)))
    assert queue.stats()["pending"] == 1
    queue.offer(job(range(50)))
    stats = queue.stats()
    assert (stats["pending"], stats["dropped"]) == (1, 1)
    result = flush(queue)
    assert not result.durable and (result.pending, result.dropped, result.entries) == (0, 1, 1)
    # Dropped stays dropped, until its tokens are on disk after all.
    assert not flush(queue).durable
    queue.offer(job(range(100, 160)))
    result = flush(queue)
    assert result.durable and result.dropped == 0


def test_a_failed_write_is_retried_by_the_next_flush(make, monkeypatch):
    store, queue = make()
    pwrite = os.pwrite
    calls = []

    def broken(fd, data, at):
        calls.append(at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", broken)
    queue.offer(job(range(50)))
    result = flush(queue)
    assert not result.durable and result.failed == 1 and result.pending == 1 and len(calls) == 1
    assert list((store.root / "tmp").iterdir()) == []
    # While the directory rests, turns leave it alone.
    assert not queue.turn() and len(calls) == 1
    monkeypatch.setattr(os, "pwrite", pwrite)
    result = flush(queue)
    assert result.durable and result.failed == 0 and result.entries == 1


def test_a_job_is_given_up_after_some_failures_and_stays_undurable(make, monkeypatch):
    store, queue = make()
    monkeypatch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    queue.offer(job(range(50)))
    results = [flush(queue) for _ in range(7)]
    assert [r.pending for r in results][-1] == 0 and not results[-1].durable and results[-1].failed == 1
    assert store.stats()["write_errors"] == 5


def test_an_entry_that_can_never_fit_is_counted_and_not_retried(make, tmp_path):
    store, queue = make(scanned(tmp_path / "c", 400_000))
    queue.offer(job(range(5000)))
    result = flush(queue)
    assert not result.durable and (result.pending, result.failed) == (0, 1)
    assert store.stats()["skipped_too_large"] == 1


def test_arrays_that_cannot_be_evaluated_fail_their_entry_only(make, monkeypatch):
    store, queue = make()
    to_bytes = feeding.to_bytes
    calls = []

    def failing(array):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return to_bytes(array)

    monkeypatch.setattr(feeding, "to_bytes", failing)
    queue.offer(job(range(50)))
    queue.offer(job(range(100, 150)))
    result = flush(queue)
    assert not result.durable and result.failed == 1 and result.entries == 1
    assert list((store.root / "tmp").iterdir()) == []


def test_keys_and_caches_that_disagree_are_not_stored(make):
    store, queue = make()
    queue.offer(job(range(51), plain(50)))
    result = flush(queue)
    assert not result.durable and result.failed == 1 and result.entries == 0


def test_a_flush_that_runs_out_of_time_says_so(make):
    _, queue = make()
    queue.offer(job(range(50)))
    started = time.monotonic()
    result = queue.flush(0.05)  # nobody takes turns
    assert time.monotonic() - started < 2
    assert not result.durable and result.pending == 1


def test_entries_that_are_on_disk_already_are_not_written_again(make):
    store, queue = make()
    queue.offer(job(range(50)))
    assert flush(queue).durable
    used = next((store.root / "v1").rglob("*.safetensors")).stat().st_mtime_ns
    queue.offer(job(range(50)))
    queue.offer(job(range(20)))
    assert queue.stats()["pending"] == 0
    assert flush(queue).durable and queue.stats()["written"] == 1
    assert next((store.root / "v1").rglob("*.safetensors")).stat().st_mtime_ns > used


class Watched(list):
    """Caches whose end can be seen."""


@pytest.mark.parametrize("path", ["written", "dropped", "superseded", "failed", "closed", "already there"])
def test_no_path_keeps_the_caches(make, monkeypatch, path):
    store, queue = make(debounce=1000.0, max_bytes=1 if path == "dropped" else 1 << 30)
    if path == "already there":
        queue.offer(job(range(50)))
        assert flush(queue).durable
    caches = Watched(plain(50))
    alive = weakref.ref(caches)
    before = mx.get_active_memory()
    queue.offer(job(range(50), caches))
    del caches
    if path in ("written", "failed"):
        if path == "failed":
            monkeypatch.setattr(feeding, "to_bytes", lambda array: 1 / 0)
        flush(queue)
    elif path == "dropped":
        queue.offer(job(range(100, 150)))
    elif path == "superseded":
        queue.offer(job(range(60)))
    elif path == "closed":
        queue.turn()
        queue.close(5.0)
    queue.turn()
    gc.collect()
    assert alive() is None
    if path in ("written", "failed", "closed", "already there"):
        wait_until(lambda: mx.get_active_memory() <= before)


def test_closing_during_a_save_leaves_no_file(make, monkeypatch):
    store, queue = make()
    entered = threading.Event()
    write_all = writer._write_all
    monkeypatch.setattr(writer, "_write_all", lambda *args: (entered.set(), time.sleep(0.05), write_all(*args)))
    queue.offer(job(range(50), plain(50, layers=20)))
    while queue.turn():
        pass
    assert entered.wait(5)
    assert queue.close(5.0)
    assert list((store.root / "tmp").iterdir()) == []
    assert queue.stats()["dropped"] == 1
    assert not queue.flush(0.1).durable


def test_the_donor_may_go_on_while_its_snapshot_is_written(make):
    """Copy-on-write: what is on disk is what was offered."""
    store, queue = make()
    donor = plain(50)
    expected = [mx.array(c.keys[:, :, :50]) for c in donor]
    mx.eval(expected)
    queue.offer(job(range(50), kinds.lend(donor)))
    step = mx.full((1, 2, 1, 8), 7.0)
    for _ in range(3):
        queue.turn()
        for cache in donor:
            cache.trim(1)
            mx.eval(cache.update_and_fetch(step, step))
    assert flush(queue).durable
    found = restore(scanned(store.root), range(50))
    assert all(mx.array_equal(c.keys[:, :, :50], e).item() for c, e in zip(found, expected, strict=True))


def test_a_flush_does_not_promise_what_a_deleted_directory_lost(make):
    store, queue = make()
    caches = plain(50)
    queue.offer(job(range(50), kinds.lend(caches)))
    assert flush(queue).durable
    shutil.rmtree(store.root)
    assert not store.covers(FINGERPRINT, "", token_key(range(50)))
    queue.offer(job(range(50), kinds.lend(caches)))
    result = flush(queue)
    assert result.durable and result.entries == 1
    assert same(restore(scanned(store.root), range(50)), caches)
