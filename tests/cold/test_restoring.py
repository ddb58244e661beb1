"""Restores in the background: turns, the memory bound, cancelling, and what becomes of a damaged file."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cold_helpers import FINGERPRINT, LARGE, job, plain, same, save, scanned

from mlx_lm_tiered.cold import arrays, reader, restoring
from mlx_lm_tiered.cold.restoring import Restorer
from mlx_lm_tiered.index.keys import token_key


@pytest.fixture
def store(tmp_path: Path):
    """Three entries of different lengths."""
    from mlx_lm_tiered.cold.store import ColdStore

    store = ColdStore(tmp_path / "cold", LARGE)
    for seed, length in enumerate((3000, 300, 200)):
        save(store, job(range(1000 * seed, 1000 * seed + length), plain(length, seed=seed, dim=64)))
    store.close()
    return scanned(tmp_path / "cold")


def entry(store, seed: int):
    length = (3000, 300, 200)[seed]
    found = store.find(FINGERPRINT, "", token_key(range(1000 * seed, 1000 * seed + length)), length)
    assert found.entry.length == length
    return found.entry


class Reads:
    """Opens restores that wait for `go` before each piece, and notes whose pieces were read."""

    def __init__(self, store):
        self.store = store
        self.go = threading.Event()
        self.order: list[int] = []
        self.ready = 0

    def open(self, entry):
        restoring = self.store.restoring(entry)
        steps = restoring.steps()

        def gated(filled=True):
            for size in steps:
                self.go.wait(10)
                self.order.append(entry.length)
                yield size
            self.order.append(-entry.length)

        restoring.steps = gated
        return restoring

    def done(self) -> None:
        self.ready += 1


def restorer(reads: Reads, max_bytes: int = LARGE, decoding=lambda: False) -> Restorer:
    return Restorer(reads.open, decoding, reads.done, max_bytes)


def until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def test_restores_take_turns_and_read_what_was_stored(store):
    reads = Reads(store)
    background = restorer(reads)
    tickets = [background.start(entry(store, seed)) for seed in range(3)]
    reads.go.set()
    until(lambda: all(ticket.done for ticket in tickets))
    assert reads.ready == 3
    # While all three were read, each piece was another's turn.
    first_end = min(reads.order.index(-length) for length in (3000, 300, 200))
    turns = reads.order[1 : first_end - 1]
    assert len(turns) > 3 and all(a != b for a, b in zip(turns, turns[1:], strict=False))
    for seed, (ticket, length) in enumerate(zip(tickets, (3000, 300, 200), strict=True)):
        assert same(ticket.restoring.caches(), plain(length, seed=seed, dim=64))
        background.release(ticket)
    assert background.stats()["restores_in_flight"] == 0 and store.stats()["restores"] == 3
    background.close()


def test_together_they_hold_no_more_than_the_bound_and_a_larger_one_goes_alone(store):
    reads = Reads(store)
    reads.go.set()
    bound = entry(store, 1).nbytes + entry(store, 2).nbytes
    background = restorer(reads, bound)
    large, second, third = (background.start(entry(store, seed)) for seed in range(3))
    until(lambda: large.done)
    time.sleep(0.05)
    assert background.stats()["restores_waiting"] == 2 and not second.done  # what was read is held until it is taken
    background.release(large)
    until(lambda: second.done and third.done)
    stats = background.stats()
    assert stats["restores_in_flight"] == 2 and stats["restores_in_flight_bytes"] <= bound and stats["restores_waiting"] == 0
    background.close()


def test_where_memory_is_short_they_go_one_by_one(store):
    reads = Reads(store)
    background = Restorer(reads.open, lambda: False, reads.done, LARGE, spare=lambda: 0)
    tickets = [background.start(entry(store, seed)) for seed in range(3)]
    reads.go.set()
    for place, ticket in enumerate(tickets):
        until(lambda ticket=ticket: ticket.done)
        stats = background.stats()
        assert (stats["restores_in_flight"], stats["restores_waiting"]) == (1, 2 - place) and not ticket.restoring.failed
        background.release(ticket)
    background.close()


def test_together_they_open_no_more_files_than_the_bound(store, monkeypatch):
    """Those that were read to the end hold none, though nobody has taken them yet."""
    monkeypatch.setattr(restoring, "MAX_FILES", 2)
    reads = Reads(store)
    background = restorer(reads)
    before = len(os.listdir("/dev/fd"))
    tickets = [background.start(entry(store, seed)) for seed in range(3)]
    until(lambda: len(os.listdir("/dev/fd")) > before)
    assert background.stats()["restores_in_flight"] == 2 and background.stats()["restores_waiting"] == 1
    reads.go.set()
    until(lambda: all(ticket.done for ticket in tickets))
    assert not any(ticket.restoring.failed for ticket in tickets) and len(os.listdir("/dev/fd")) == before
    background.close()


def test_a_process_without_descriptors_left_forgets_no_entry(store, monkeypatch):
    real = os.open

    def none_left(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    assert store.restore(entry(store, 0)) is None
    monkeypatch.setattr(os, "open", real)
    assert same(store.restore(entry(store, 0)), plain(3000, seed=0, dim=64))


def test_a_cancelled_restore_ends_and_lets_the_next_begin(store):
    reads = Reads(store)
    background = restorer(reads, 1)
    reading, waiting, after = (background.start(entry(store, seed)) for seed in range(3))
    until(lambda: background.stats()["restores_in_flight"] == 1)
    background.release(waiting)
    background.release(reading)
    reads.go.set()
    until(lambda: after.done)
    assert not after.restoring.failed and waiting.cancelled and reading.restoring.failed and reading.restoring.caches() is None
    assert background.stats() == {
        "restores_in_flight": 1, "restores_in_flight_bytes": after.entry.nbytes, "restores_waiting": 0,
        "restores_in_background": 2, "restores_cancelled": 2,
    }  # fmt: skip
    assert -3000 not in reads.order
    background.close()


def test_a_damaged_file_fails_and_is_put_away(store):
    reads = Reads(store)
    reads.go.set()
    background = restorer(reads)
    damaged = entry(store, 0)
    data = bytearray(damaged.path.read_bytes())
    data[-9] ^= 4
    damaged.path.write_bytes(data)
    ticket = background.start(damaged)
    until(lambda: ticket.done)
    assert ticket.restoring.failed and ticket.restoring.caches() is None
    assert store.stats()["quarantined"] == 1 and store.stats()["restores"] == 0
    background.close()


def test_while_rows_decode_it_takes_its_time(store, monkeypatch):
    monkeypatch.setattr(restoring, "SHARE", 0.02)
    times = []
    for decoding in (False, True):
        reads = Reads(store)
        reads.go.set()
        background = restorer(reads, decoding=lambda decoding=decoding: decoding)
        started = time.monotonic()
        ticket = background.start(entry(store, 0))
        until(lambda ticket=ticket: ticket.done)
        times.append(time.monotonic() - started)
        background.close()
    assert times[1] > 0.1 and times[1] > 3 * times[0], times


class Costly:
    """A restore whose pieces each take 0.4 ms of a processor."""

    def __init__(self):
        self.failed = True

    def steps(self, filled=True):
        for _ in range(50):
            until = time.thread_time() + 0.0004
            while time.thread_time() < until:
                pass
            yield 1
        self.failed = False


@pytest.mark.parametrize(("cores", "share"), [(2, 0.04), (4, 0.08), (32, 0.25)])
def test_where_cores_are_few_it_takes_less_of_them(store, monkeypatch, cores, share):
    """Measured by its pauses, which are no shorter than is worth waking for."""
    pauses = []
    monkeypatch.setattr(restoring, "cores", lambda: cores)
    monkeypatch.setattr(restoring, "time", SimpleNamespace(sleep=pauses.append, perf_counter=time.perf_counter, thread_time=time.thread_time))
    background = Restorer(lambda _: Costly(), lambda: True, lambda: None, LARGE)
    ticket = background.start(entry(store, 0))
    until(lambda: ticket.done)
    background.close()
    least = 50 * 0.0004 * (1 / share - 1)
    assert least - restoring.LEAST <= sum(pauses) < 2 * least and min(pauses) > restoring.LEAST / 2


def test_beside_decoding_a_piece_is_small_and_no_page_is_replaced(store, monkeypatch):
    advised = []
    monkeypatch.setattr(reader, "ask_for_huge_pages", advised.append)
    monkeypatch.setattr(arrays, "LEAST_BESIDE", 1 << 16)
    large = entry(store, 0)
    sizes = [size for size in store.restoring(large).steps() if size]
    assert max(sizes) < 2 << 16 and sum(sizes) > 10 << 16 and not advised
    assert same(store.restore(large), plain(3000, seed=0, dim=64)) and advised


def test_where_decoding_has_the_same_cores_the_generation_thread_makes_the_memory_unfilled(store, monkeypatch):
    """But not of what must wait, or has many files: that is made later by the reader, which may not leave it unfilled."""
    made, real = [], arrays.fresh

    def noting(shape, dtype, filled=False):
        made.append((threading.current_thread() is threading.main_thread(), filled))
        return real(shape, dtype, filled)

    monkeypatch.setattr(arrays, "fresh", noting)
    background = Restorer(store.restoring, lambda: False, lambda: None, entry(store, 0).nbytes, computes_here=lambda: True)
    tickets = [background.start(entry(store, seed)) for seed in (0, 1)]
    for ticket, seed, length, here in ((tickets[0], 0, 3000, True), (tickets[1], 1, 300, False)):
        until(lambda ticket=ticket: ticket.done)
        assert len(made) > 1 and set(made) == {(here, not here)}
        assert same(ticket.restoring.caches(), plain(length, seed=seed, dim=64))
        made.clear()
        background.release(ticket)
    monkeypatch.setattr(restoring, "FEW_FILES", 0)
    ticket = background.start(entry(store, 2))
    until(lambda: ticket.done)
    assert set(made) == {(False, True)} and not ticket.restoring.failed
    background.close()


def test_what_cannot_be_opened_on_the_generation_thread_has_failed_like_any_other(store):
    gone = entry(store, 1)
    gone.path.unlink()
    background = Restorer(store.restoring, lambda: False, lambda: None, LARGE, computes_here=lambda: True)
    tickets = [background.start(gone), background.start(entry(store, 2))]
    until(lambda: all(ticket.done for ticket in tickets))
    assert [ticket.restoring.failed for ticket in tickets] == [True, False]
    background.close()


def test_closing_ends_what_is_not_done(store):
    reads = Reads(store)
    background = restorer(reads, 1)
    tickets = [background.start(entry(store, seed)) for seed in range(3)]
    threading.Timer(0.05, reads.go.set).start()
    background.close()
    assert all(ticket.done and ticket.restoring.failed for ticket in tickets)


def test_how_far_a_restore_is_can_be_seen(store):
    reads = Reads(store)
    one = restorer(reads, max_bytes=1)  # so that the second waits
    first, second = one.start(entry(store, 0)), one.start(entry(store, 1))
    sizes = [sum(link.nbytes for link in entry(store, seed).chain) for seed in (0, 1)]
    assert one.progress() == [(3000, 0, sizes[0]), (300, 0, sizes[1])]
    reads.go.set()
    until(lambda: first.done)
    tokens, read, size = one.progress()[0]
    assert (tokens, size) == (3000, sizes[0]) and 0.9 * size < read <= size
    one.release(first)
    until(lambda: second.done)
    one.release(second)
    assert one.progress() == []
    one.close()
