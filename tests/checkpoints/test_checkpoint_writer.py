"""The checkpoint writer by itself: what is kept, what goes, what waits, what counts as lost."""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_hooks import GenerationState
from mlx_lm_tiered.checkpoints.pace import Pace
from mlx_lm_tiered.checkpoints.snapshot import KIND, Attempt, namespace_of, state_of, take
from mlx_lm_tiered.checkpoints.writer import CheckpointWriter
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.index.keys import token_key

PROMPT = list(range(100, 140))
IDENTITY = Identity("cd" * 16, {"mlx": "test"})


class Row:
    """A generation whose caches grow as a row's do."""

    def __init__(self) -> None:
        self.caches = [KVCache(), KVCache()]
        self.tokens: list[int] = []
        self.grow(PROMPT)

    def grow(self, tokens: list[int]) -> GenerationState:
        for i, cache in enumerate(self.caches):
            values = mx.random.normal((1, 2, len(tokens), 8), key=mx.random.key(1000 * i + len(self.tokens)))
            cache.update_and_fetch(values, values + 1)
        self.tokens += tokens
        return GenerationState(list(self.tokens), 7, self.caches, 3, (5, 6))

    def emit(self, count: int) -> GenerationState:
        return self.grow(list(range(count)))


@pytest.fixture
def store(tmp_path: Path):
    store = ColdStore(tmp_path / "cold", 1 << 30)
    store.attach(IDENTITY.fingerprint)
    assert store.wait_scanned(30)
    yield store
    store.close()


@pytest.fixture
def writer(store):
    writer = CheckpointWriter(store, lambda: False, 1 << 30)
    yield writer
    writer.close()


def attempt(policy: str = "greedy") -> Attempt:
    return Attempt(IDENTITY, namespace_of(PROMPT, policy), len(PROMPT))


def save(writer: CheckpointWriter, one: Attempt, state: GenerationState) -> None:
    writer.basis(one)
    writer.offer(take(one, state))


def newest(store: ColdStore, one: Attempt):
    return store.newest(IDENTITY.fingerprint, one.namespace, token_key(PROMPT), KIND)


def files(store: ColdStore) -> list[Path]:
    return sorted(file.path for file in Directory(store.root, 0).files() if file.kind == "entry")


def same(restored: list, row: Row) -> bool:
    return all(
        a.offset == b.offset and mx.array_equal(a.keys[..., : a.offset, :], b.keys[..., : b.offset, :]).item()
        for a, b in zip(restored, row.caches, strict=True)
    )


def test_later_ones_write_their_new_tokens_and_come_back_whole(store, writer):
    row, one = Row(), attempt()
    sizes = []
    for _ in range(4):
        save(writer, one, row.emit(16))
        assert writer.flush(10) == (0, 0)
        sizes.append(store.stats()["new_token_bytes"])
    per_token = 2 * 2 * 2 * 8 * 4
    assert [b - a for a, b in zip([0, *sizes], sizes, strict=False)] == [56 * per_token, *[16 * per_token] * 3]
    again = ColdStore(store.root, 1 << 30)
    again.attach(IDENTITY.fingerprint)
    assert again.wait_scanned(30)
    entry = newest(again, one)
    caches = again.restore(entry)
    state = state_of(list(caches), entry.key, PROMPT, caches.companion)
    assert state.tokens == row.tokens and (state.pending, state.context, state.random) == (7, 3, (5, 6))
    assert same(caches, row)
    again.close()


def test_what_waiting_ones_go_on_from_stays_until_they_are_written(store, writer):
    row, one = Row(), attempt()
    save(writer, one, row.emit(16))
    assert writer.flush(10) == (0, 0)
    writer.basis(one)
    early = take(one, row.emit(16))  # from the first, offered late
    writer.basis(one)
    save(writer, one, row.emit(16))
    assert writer.flush(10) == (0, 0)
    assert early.parent.path in files(store)
    one.basis = early.parent  # it is still being taken
    save_from = take(one, row.emit(16))
    one.basis = early.parent
    save(writer, attempt("another"), Row().emit(8))
    writer.offer(save_from)
    assert writer.flush(10) == (0, 0)
    assert same(store.restore(newest(store, one)), row) and writer.stats()["failed"] == 0


def test_an_answered_request_is_void_at_once_and_leaves_nothing(store, writer):
    row, one, other = Row(), attempt(), attempt("another")
    save(writer, one, row.emit(16))
    save(writer, other, row.emit(16))
    assert writer.flush(10) == (0, 0) and len(files(store)) == 2
    writer.void(one)
    assert writer.is_void(IDENTITY.fingerprint, one.namespace) or newest(store, one) is None
    save(writer, one, row.emit(16))  # too late: the request is over
    assert writer.flush(10) == (0, 0)
    assert newest(store, one) is None and not writer.is_void(IDENTITY.fingerprint, one.namespace)
    assert newest(store, other) is not None and len(files(store)) == 1
    # The same request again: its files are not those that were removed.
    fresh = attempt()
    save(writer, fresh, Row().emit(16))
    assert writer.flush(10) == (0, 0) and newest(store, fresh) is not None


def test_a_newer_one_takes_the_place_of_a_waiting_one_and_the_cap_holds(store):
    writer = CheckpointWriter(store, lambda: False, max_bytes=1)
    with writer._condition:  # nothing is taken off the queue meanwhile
        rows = [Row(), Row(), Row()]
        attempts = [attempt(str(i)) for i in range(3)]
        for row, one in zip(rows, attempts, strict=True):
            save(writer, one, row.emit(8))
        save(writer, attempts[2], rows[2].emit(8))
        seen = writer.stats()
    assert (seen["superseded"], seen["dropped"]) == (1, 2)
    left, lost = writer.flush(10)
    assert (left, lost) == (0, 2) and newest(store, attempts[2]).length == 56
    save(writer, attempts[0], rows[0].emit(8))
    assert writer.flush(10) == (0, 1)
    writer.close()


def test_rows_take_turns_although_newer_ones_come_faster_than_they_are_written(store, writer):
    """Each row's newest is offered again before the other's is written: the one that waits longer is written first all the same."""
    first, second = Row(), Row()
    ones = attempt("first"), attempt("second")
    with writer._condition:
        for _ in range(4):
            save(writer, ones[0], first.emit(8))
            save(writer, ones[1], second.emit(8))
        waiting = [work.attempt for work in writer._work]
        save(writer, ones[0], first.emit(8))
        assert [work.attempt for work in writer._work] == waiting == list(ones)
    assert writer.flush(10) == (0, 0) and writer.stats()["superseded"] == 7
    assert newest(store, ones[0]).length == 80 and newest(store, ones[1]).length == 72


def test_what_cannot_be_written_is_lost_until_the_next_is(store, writer, monkeypatch):
    row, one = Row(), attempt()
    save(writer, one, row.emit(8))
    assert writer.flush(10) == (0, 0)
    for path in files(store):
        path.unlink()  # by someone else: what goes on from it cannot be written
    save(writer, one, row.emit(8))
    assert writer.flush(10) == (0, 1) and writer.stats()["failed"] == 1
    monkeypatch.setattr(type(store), "retry_in", 0.0)
    store._outage._until.clear()
    save(writer, one, row.emit(8))  # whole again
    assert writer.flush(10) == (0, 0) and same(store.restore(newest(store, one)), row)


def test_a_checkpoint_that_another_process_took_away_is_no_fault_of_the_disk(store, writer):
    """One that was answered there, or evicted: the next checkpoint is whole, and nothing rests."""
    row, one = Row(), attempt()
    save(writer, one, row.emit(8))
    assert writer.flush(10) == (0, 0)
    for path in files(store):
        path.unlink()
    save(writer, one, row.emit(8))
    assert writer.flush(10) == (0, 1) and store.retry_in == 0 and store.stats()["write_errors"] == 0
    save(writer, one, row.emit(8))
    assert writer.flush(10) == (0, 0) and same(store.restore(newest(store, one)), row)


@pytest.mark.parametrize(
    "change",
    [
        {"pending": -1}, {"pending": 1 << 31}, {"pending": True}, {"context": 41}, {"random": [1]}, {"random": [1, 1 << 32]},
        {"random": "ab"}, {"prompt": 39}, {"more": 1},
    ],
)  # fmt: skip
def test_a_state_that_no_request_came_to_is_refused(change):
    row = Row()
    snapshot = take(attempt(), row.emit(4))
    beside = snapshot.meta.companion
    assert state_of(row.caches, snapshot.key, PROMPT, beside) is not None
    assert state_of(row.caches, snapshot.key, [*PROMPT[:-1], 0], beside) is None
    assert state_of(row.caches, token_key(PROMPT), PROMPT, beside) is None
    from dataclasses import replace

    assert state_of(row.caches, snapshot.key, PROMPT, replace(beside, scalars=dict(beside.scalars) | change)) is None


def test_the_thread_rests_while_rows_decode_and_not_when_somebody_waits():
    now, rests, busy, hurry = [0.0], [], [True], [False]
    pace = Pace(lambda: busy[0], lambda: hurry[0], lambda s: (rests.append(s), now.__setitem__(0, now[0] + s)), 0.2, lambda: now[0])
    pace.start()
    for _ in range(10):
        now[0] += 0.01
        pace.step()
    assert sum(rests) == pytest.approx(0.4)  # four times the work
    busy[0] = False
    now[0] += 1
    pace.step()
    busy[0], hurry[0] = True, True
    now[0] += 1
    pace.step()
    assert sum(rests) == pytest.approx(0.4)


def test_a_busy_writer_still_comes_to_an_end(store):
    writer = CheckpointWriter(store, lambda: True, 1 << 30)
    one = attempt()
    save(writer, one, Row().emit(16))
    deadline = time.monotonic() + 20
    while newest(store, one) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert newest(store, one) is not None
    writer.close()
