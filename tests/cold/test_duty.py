"""A server that always has requests writes all the same, in a small share of the time."""

from __future__ import annotations

import time

import pytest
from cold_helpers import flush, job, plain, scanned

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold import background, duty, spill, writer
from mlx_lm_tiered.cold.duty import Duty
from mlx_lm_tiered.cold.spill import SpillQueue


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    queues = []

    def build(**options):
        store = scanned(tmp_path / "c")
        queue = SpillQueue(store, lambda: True, clock=clock, debounce=1.0, **options)
        queues.append(queue)
        return store, queue

    yield build
    for queue in queues:
        assert queue.close(5.0)


def busily(queue, until, timeout=20.0):
    """What the engine does between steps, in quick motion."""
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, "it did not happen"
        queue.busy_turn()
        time.sleep(0.0005)


@pytest.fixture
def quick(monkeypatch):
    """Shares at which a test ends soon."""
    monkeypatch.setattr(duty, "TURNS", 0.5)
    monkeypatch.setattr(duty, "WRITES", 0.5)


def test_a_duty_is_a_share_of_the_time_and_a_burst_after_rest(clock):
    share = Duty(0.01, 0.1, clock)
    worked = 0
    for _ in range(100_000):
        clock.now += 0.001
        if share.allowed():
            share.spent(0.004)
            worked += 1
    assert 0.9 <= worked * 0.004 <= 1.0 + 0.1 + 0.004  # of 100 s
    clock.now += 1e6
    burst = 0
    while share.allowed():
        share.spent(0.004)
        burst += 1
    assert 25 <= burst <= 26
    share.spent(10.0)
    clock.now += 900
    assert not share.allowed()
    clock.now += 120
    assert share.allowed()


def test_what_waited_too_long_is_written_while_requests_run(make, clock, quick):
    store, queue = make()
    queue.offer(job(range(50)))
    clock.now += 1.0 + spill.OVERDUE - 0.1
    for _ in range(50):
        queue.busy_turn()
    time.sleep(0.05)
    assert store.stats()["written_bytes"] == 0
    clock.now += 0.2
    busily(queue, lambda: queue.stats()["written"] == 1)
    assert store.stats()["entries"] == 1 and queue.stats()["pending"] == 0


def test_what_is_urgent_is_written_first_and_at_once(make, quick):
    store, queue = make()
    queue.offer(job(range(50)))
    hurried = job(range(100, 130))
    hurried.urgent = True
    queue.debounce = 0.0
    queue.offer(hurried)
    busily(queue, lambda: queue.stats()["written"] == 1)
    assert queue.stats()["pending"] == 1 and store.stats()["longest_durable_prefix_tokens"] == 30


def test_a_queue_that_fills_up_is_written_while_requests_run(make, clock, quick):
    store, queue = make(max_bytes=3 * kinds.nbytes(plain(50)))
    queue.offer(job(range(50)))
    clock.now += 2.0
    for _ in range(50):
        queue.busy_turn()
    assert queue.stats()["pending"] == 1 and store.stats()["written_bytes"] == 0
    queue.offer(job(range(100, 150)))
    clock.now += 2.0
    busily(queue, lambda: queue.stats()["written"] == 1)
    assert queue.stats()["pending"] == 1, "no more than must"


def test_writes_keep_to_their_share(make, monkeypatch):
    """However much waits."""
    monkeypatch.setattr(duty, "TURNS", 0.05)
    monkeypatch.setattr(duty, "WRITES", 0.05)
    monkeypatch.setattr(background, "PIECE", 1 << 14)
    store, queue = make()
    write_all = writer._write_all

    def costly(*args):
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        write_all(*args)

    spent = []
    worked = queue._pace._writes.spent
    monkeypatch.setattr(queue._pace._writes, "spent", lambda seconds: (spent.append(seconds), worked(seconds)))
    monkeypatch.setattr(writer, "_write_all", costly)
    waiting = job(range(2000), plain(2000, layers=8))
    waiting.urgent = True
    queue.debounce = 0.0
    queue.offer(waiting)
    started = time.monotonic()
    while time.monotonic() - started < 1.5:
        queue.busy_turn()
        time.sleep(0.001)
    assert store.stats()["written_bytes"] > 0 and queue.stats()["written"] == 0
    elapsed = time.monotonic() - started
    # The burst, and the last piece may overdraw.
    assert sum(spent) <= 0.05 * elapsed + 0.005 + max(spent)
    assert len(spent) > 10
    assert flush(queue).durable


def test_without_a_reason_nothing_is_done_between_steps(make, clock):
    store, queue = make()
    queue.offer(job(range(50)))
    clock.now += 30
    for _ in range(100):
        queue.busy_turn()
    assert queue.stats()["pending"] == 1 and store.stats()["written_bytes"] == 0
