"""Reading into memory that holds anything, with several threads, past what some processors are slow at."""

from __future__ import annotations

import os
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest
from cold_helpers import grown, job, restore, same, save, scanned

from mlx_lm_tiered.cold import arrays, parallel, reader
from mlx_lm_tiered.cold import fresh as freshly
from mlx_lm_tiered.cold.fresh import fresh


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.bfloat16, mx.float16, mx.float32, mx.int64, mx.complex64], ids=str)
def test_fresh_memory_is_the_arrays_own(dtype):
    """What numpy writes into it, mlx computes with, also after the next array was made."""
    made = [fresh((3, 1000), dtype) for _ in range(4)]
    for number, array in enumerate(made):
        assert array.shape == (3, 1000) and array.dtype == dtype
        view = np.array(array.view(mx.uint16) if dtype == mx.bfloat16 else array, copy=False)
        view[:] = number % 2
    mx.eval(made)
    for number, array in enumerate(made):
        wanted = mx.ones if number % 2 else mx.zeros
        raw = array.view(mx.uint16) if dtype == mx.bfloat16 else array
        assert mx.array_equal(raw, wanted(raw.shape, dtype=raw.dtype)).item()


def test_the_process_does_not_end_before_mlx_has_let_go_of_what_answered_its_reads():
    """mlx does that on a thread of its own a moment later; see `_let_go`. Here the moment is made long."""
    made = [fresh((3, 1000), mx.float32) for _ in range(20)]
    freshly._let_go()
    assert len(made) == 20 and [one for one in freshly._readers if one() is not None] == []
    held = [freshly._Unread((3,), 4)]
    freshly._readers.append(weakref.ref(held[0]))
    threading.Timer(0.2, held.clear).start()
    freshly._let_go()
    assert held == []


def test_the_room_behind_the_tokens_is_empty_whatever_the_memory_held(tmp_path, monkeypatch):
    def poisoned(shape, dtype, filled=False):
        array = mx.full(shape, float("nan"), dtype=dtype)
        mx.eval(array)
        return array

    monkeypatch.setattr(arrays, "fresh", poisoned)
    store = scanned(tmp_path / "c")
    save(store, job(range(300), grown(300)))
    save(store, job(range(700), grown(700)))
    assert store.stats()["segments"] == 1
    caches = restore(store, range(700))
    assert same(caches, grown(700))
    for cache in caches:
        assert cache.keys.shape[2] > 700
        assert not mx.any(cache.keys[:, :, 700:] != 0).item() and not mx.any(cache.values[:, :, 700:] != 0).item()


def test_large_entries_are_read_by_several_threads_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "ALONE", 0)
    monkeypatch.setattr(parallel, "THREADS", 3)
    monkeypatch.setattr(arrays, "PIECE", 1 << 12)
    seen = set()
    real = reader._PREADV
    # Two must read at the same time for either to go on.
    meeting = threading.Barrier(2)

    def noting(fd, batch, at):
        name = threading.current_thread().name
        if name not in seen and len(seen) < 2:
            seen.add(name)
            meeting.wait(10)
        return real(fd, batch, at)

    store = scanned(tmp_path / "c", verify="always")
    path = save(store, job(range(300), grown(300, layers=4)))
    monkeypatch.setattr(reader, "_PREADV", noting)
    assert same(restore(store, range(300)), grown(300, layers=4))
    assert len(seen) == 2
    content = bytearray(path.read_bytes())
    content[-3000] ^= 4
    path.write_bytes(content)
    assert restore(store, range(300)) is None and store.stats()["corrupt"] == 1


def test_of_several_failures_the_first_task_s_is_raised_and_the_rest_is_left_out(monkeypatch):
    monkeypatch.setattr(parallel, "THREADS", 2)
    done, both = [], threading.Barrier(2)

    def fail(number):
        both.wait(10)
        raise ValueError(str(number))

    rest = [lambda: done.append(1)] * 3
    tasks = [lambda: fail(0), *rest, lambda: fail(1), *rest]
    with pytest.raises(ValueError, match="0"):
        parallel.run_all(tasks)
    assert not done


def test_each_thread_has_a_stretch_and_then_helps_the_others(monkeypatch):
    monkeypatch.setattr(parallel, "THREADS", 2)
    ran: dict[str, list[int]] = {}
    begun, rest_done = threading.Event(), threading.Event()

    def task(number):
        ran.setdefault(threading.current_thread().name, []).append(number)
        if number == 0:
            begun.set()
            assert rest_done.wait(10)
        if number == 4:
            assert begun.wait(10)
        if number == 1:
            rest_done.set()

    parallel.run_all([lambda number=number: task(number) for number in range(8)])
    assert sorted(ran.values()) == [[0], [4, 5, 6, 7, 3, 2, 1]]


@pytest.mark.parametrize("shift", [0, 8, 24, 31, 32, 2048])
def test_reads_through_the_buffer_are_the_same(tmp_path, monkeypatch, shift):
    """Where memory and file have nearly the same place in a page, a read takes a detour; pieces end anywhere."""
    content = os.urandom(3 * reader.BUFFER + 777)
    (tmp_path / "file").write_bytes(content)
    memory = np.zeros(len(content) + 3 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    piece = memoryview(memory)[start : start + len(content) - 4096]
    batches = []
    real = reader._PREADV
    monkeypatch.setattr(reader, "_PREADV", lambda fd, batch, at: batches.append(len(batch[0])) or real(fd, [batch[0][:100_000]], at))
    with open(tmp_path / "file", "rb") as file:
        reader.read_into(file.fileno(), [piece], 4096)
    assert bytes(piece) == content[4096:]
    assert (max(batches) <= reader.BUFFER) == (0 < shift < reader.OVERLAPPING)
    assert not memory[:start].any() and not memory[start + len(piece) :].any()
