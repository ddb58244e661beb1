"""What other processes do to the directory is seen without a restart, off the request path; nobody's lock stops serving."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest
from cold_helpers import FINGERPRINT, grown, job, plain, restore, same, save, scanned

from mlx_lm_tiered.cold import indexing
from mlx_lm_tiered.cold.indexing import LOOK_EVERY
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.index.keys import token_key


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ours(tmp_path, clock):
    store = ColdStore(tmp_path / "c", 1 << 30, clock=clock)
    store.attach(FINGERPRINT)
    assert store.wait_scanned(30)
    yield store
    store.close()


def finds(store, clock, tokens):
    """Length that is found for these tokens, by the second request after some seconds."""
    clock.now += LOOK_EVERY + 0.1
    key = token_key(tokens)
    store.find(FINGERPRINT, "", key, len(tokens))
    assert store._indexing.wait_looked(10)
    found = store.find(FINGERPRINT, "", key, len(tokens))
    return found.length if found else 0


def test_what_another_process_stored_is_found(tmp_path, ours, clock):
    theirs = scanned(tmp_path / "c")
    for n in (30, 60, 90):  # whole, and segments that continue it
        save(theirs, job(range(n), grown(n)))
        assert finds(ours, clock, range(n)) == n
    assert same(restore(ours, range(90)), grown(90))
    save(ours, job(range(120), grown(120)))
    assert ours.stats()["longest_chain"] == 4 and ours.stats()["found_later"] == 3


def test_looks_are_seldom_and_only_at_what_changed(tmp_path, ours, clock, monkeypatch):
    theirs = scanned(tmp_path / "c")
    save(theirs, job(range(30)))
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(indexing.os, "listdir", lambda path: listed.append(path) or listdir(path))
    monkeypatch.setattr(indexing, "UNSETTLED", 0.0)
    key = token_key(range(30))
    for _ in range(1000):
        clock.now += LOOK_EVERY / 1000 - 1e-6
        ours.find(FINGERPRINT, "", key, 30)
    assert ours._indexing.wait_looked(10) and listed == []
    for _ in range(20):
        finds(ours, clock, range(30))
    assert len(listed) == 1
    save(theirs, job(range(50, 80)))
    listed.clear()
    assert finds(ours, clock, range(50, 80)) == 30 and len(listed) == 1


def test_a_change_right_after_a_look_is_not_missed(tmp_path, ours, clock):
    """A folder's time stamp is as coarse as the system's clock ticks."""
    theirs = scanned(tmp_path / "c")
    path = save(theirs, job(range(30)))
    assert finds(ours, clock, range(30)) == 30
    stamp = path.parent.stat().st_mtime_ns
    save(theirs, job(range(50, 80)))
    os.utime(path.parent, ns=(stamp, stamp))
    assert finds(ours, clock, range(50, 80)) == 30


def test_the_request_path_does_not_wait_for_a_look(ours, clock, monkeypatch):
    entered, gate = threading.Event(), threading.Event()
    changed = indexing.Indexing._changed
    monkeypatch.setattr(indexing.Indexing, "_changed", lambda *args: (entered.set(), gate.wait(10), changed(*args))[-1])
    clock.now += LOOK_EVERY + 0.1
    started = time.perf_counter()
    assert ours.find(FINGERPRINT, "", token_key(range(30)), 30) is None
    assert ours.wait_scanned(10)
    assert time.perf_counter() - started < 1.0 and entered.wait(5)
    gate.set()


def test_what_another_process_deleted_is_forgotten_with_what_continued_it(tmp_path, ours, clock):
    paths = [save(ours, job(range(n), grown(n))) for n in (30, 60)]
    save(ours, job(range(500, 520)))
    finds(ours, clock, range(60))
    paths[0].unlink()
    assert finds(ours, clock, range(60)) == 0
    assert finds(ours, clock, range(500, 520)) == 20
    assert ours.stats()["corrupt"] == ours.stats()["read_errors"] == 0
    shutil.rmtree(tmp_path / "c")
    assert finds(ours, clock, range(500, 520)) == 0
    save(ours, job(range(30)))
    assert finds(ours, clock, range(30)) == 30


def test_a_child_that_came_before_its_parent_is_taken_in_with_it(tmp_path, ours, clock):
    theirs = scanned(tmp_path / "c")
    parent, child = (save(theirs, job(range(n), grown(n))) for n in (30, 60))
    away = tmp_path / "away"
    parent.rename(away)
    assert finds(ours, clock, range(60)) == 0
    away.rename(parent)
    assert finds(ours, clock, range(60)) == 60


def test_an_entry_that_another_process_replaced_is_read_anew(tmp_path, ours, clock):
    """A chain goes with its root; the new root is taken in at the next look."""
    save(ours, job(range(30), grown(30)))
    save(ours, job(range(60), grown(60)))
    finds(ours, clock, range(60))
    other = scanned(tmp_path / "other")
    replaced = save(other, job(range(30), plain(30, seed=5)))
    os.replace(replaced, next(p for p in (tmp_path / "c").rglob(replaced.name)))
    assert restore(ours, range(60)) is None
    finds(ours, clock, range(30))
    assert same(restore(ours, range(30)), plain(30, seed=5))
