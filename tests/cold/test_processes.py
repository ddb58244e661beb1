"""Several processes, and processes that die: the directory stays whole and below its cap."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import child_save
import pytest
from cold_helpers import FINGERPRINT, disk_bytes, grown, job, plain, restore, same, save, scanned

from mlx_lm_tiered.cold.catalog import MAX_CHAIN
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.index.keys import token_key

HERE = Path(__file__).parent


class Child:
    """A process that runs a function of `child_save.py`, forked from one that has imported everything."""

    def __init__(self, process: BaseProcess, pipe: Connection):
        self.process = process
        self.pipe = pipe

    def rest(self) -> list[Any]:
        """What it said that was not read yet, until its end."""
        said = []
        while True:
            try:
                said.append(self.pipe.recv())
            except EOFError:
                return said


Start = Callable[..., AbstractContextManager[Child]]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        context.set_forkserver_preload(["child_save"])
        forkserver.ensure_running()

    @contextmanager
    def child(name: str, *args: object) -> Iterator[Child]:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=child_save.run, args=(name, sender, *args))
        process.start()
        sender.close()
        try:
            yield Child(process, receiver)
        finally:
            process.kill()
            process.join()
            receiver.close()

    yield child


def partials(root: Path) -> list[Path]:
    return list((root / "tmp").glob("*"))


def test_a_kill_at_any_moment_leaves_the_old_entry_or_the_new_one(tmp_path: Path, start: Start) -> None:
    draw = random.Random(5)
    root = tmp_path / "c"
    durable = 0
    orphans = 0
    for _ in range(12):
        with start("replace", root) as child:
            for _ in range(draw.randrange(1, 3)):
                durable = child.pipe.recv()
            time.sleep(draw.random() * 0.08)
            child.process.kill()
            rest = child.rest()
        durable = rest[-1] if rest else durable
        orphans += bool(partials(root))
        store = scanned(root)
        assert partials(root) == []
        longest = store.stats()["longest_durable_prefix_tokens"]
        # A commit may have become durable in the moment before it could be said.
        assert longest in (durable, durable + 50)
        found = restore(store, range(longest))
        assert found is not None and same(found, plain(longest, layers=4, seed=longest))
        assert store.stats()["corrupt"] == 0
        store.close()
    assert orphans > 0, "no kill hit a save; the test proves nothing"


def test_a_kill_at_any_moment_leaves_a_chain_without_gaps(tmp_path: Path, start: Start) -> None:
    draw = random.Random(6)
    root = tmp_path / "c"
    durable = orphans = 0
    for _ in range(12):
        with start("grow", root) as child:
            for _ in range(draw.randrange(1, 9)):
                durable = child.pipe.recv()
            time.sleep(draw.random() * 0.02)
            child.process.kill()
            rest = child.rest()
        durable = rest[-1] if rest else durable
        orphans += bool(partials(root))
        store = scanned(root)
        stats = store.stats()
        longest = stats["longest_durable_prefix_tokens"]
        assert longest in (durable, durable + 10)
        assert stats["scans"][FINGERPRINT]["without parent"] == stats["corrupt"] == 0
        found = restore(store, range(longest))
        assert found is not None and same(found, grown(longest, layers=4))
        store.close()
    assert orphans > 0, "no kill hit a save; the test proves nothing"
    # The chain was at its longest once, and what the whole entry made superfluous went.
    assert longest // 10 > MAX_CHAIN or stats["longest_chain"] == longest // 10


def test_a_later_start_leaves_a_live_writer_alone_and_cleans_up_after_a_dead_one(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "c"
    with start("hang", root) as child:
        assert child.pipe.recv() == "writing"
        scanned(root).close()
        assert len(partials(root)) == 1
    scanned(root).close()
    assert partials(root) == []
    assert list((root / "writers").iterdir()) == []


def test_processes_share_a_directory_below_its_cap(tmp_path: Path, start: Start) -> None:
    root, cap = tmp_path / "c", 1_500_000
    scanned(root, cap).close()
    highest = 0
    with ExitStack() as stack:
        children = [stack.enter_context(start("share", root, seed, cap, 60)) for seed in range(3)]
        while any(child.process.is_alive() for child in children):
            highest = max(highest, disk_bytes(root))
            time.sleep(0.002)
        reports = [child.pipe.recv() for child in children]
        assert all(child.process.exitcode == 0 for child in children)
    assert highest <= cap
    for saved, restored, corrupt, write_errors, read_errors in reports:
        assert saved > 10 and restored > 0
        assert corrupt == write_errors == read_errors == 0
    store = scanned(root, cap)
    assert store.stats()["entries"] > 0 and store.stats()["corrupt"] == 0


def test_an_entry_that_another_process_deleted_is_a_miss(tmp_path):
    store = scanned(tmp_path / "c")
    path = save(store, job(range(30)))
    path.unlink()
    assert restore(store, range(30)) is None
    assert store.stats()["entries"] == 0 and store.stats()["corrupt"] == 0
    assert restore(store, range(30)) is None


def test_an_entry_that_another_process_replaced_is_read_whole(tmp_path):
    """One descriptor serves the whole restore."""
    ours, theirs = scanned(tmp_path / "c"), scanned(tmp_path / "c")
    save(ours, job(range(30), plain(30, seed=1)))
    replaced = plain(30, seed=2)
    save(theirs, job(range(30), replaced))
    found = restore(ours, range(30))
    assert found is not None and same(found, replaced)


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_a_file_under_the_wrong_name_serves_nothing(tmp_path, who):
    store = scanned(tmp_path / "c")
    a = save(store, job(range(30)))
    b = save(store, job(range(100, 130)))
    os.replace(b, a)
    if who == "writer":
        store = scanned(tmp_path / "c")
        assert store.stats()["entries"] == 0
    assert restore(store, range(30)) is None


def test_a_lock_that_is_held_does_not_stop_serving_and_is_taken_over_from_the_dead(tmp_path: Path, start: Start) -> None:
    """Lookups, restores, damage and a start go on; what must wait is the writer's, which gets the lock when its owner is killed."""
    root = tmp_path / "c"
    store = scanned(root)
    whole, damaged = save(store, job(range(30), plain(30))), save(store, job(range(500, 530)))
    with open(damaged, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with start("hold", root) as child:
        assert child.pipe.recv() == "locked"
        began = time.monotonic()
        found = restore(store, range(30))
        assert found is not None and same(found, plain(30))
        assert restore(store, range(500, 530)) is None
        later = ColdStore(root, 1 << 30)
        later.attach(FINGERPRINT)
        assert later.wait_scanned(5, FINGERPRINT) and later.covers(FINGERPRINT, "", token_key(range(30)))
        assert time.monotonic() - began < 8
        assert damaged.exists() and partials(root) == []
        began, saved = time.monotonic(), []
        writer = threading.Thread(target=lambda: saved.append(save(store, job(range(60), plain(60)))))
        writer.start()
        time.sleep(0.2)
        assert not saved
        child.process.kill()
        writer.join(20)
        assert saved
    deadline = time.monotonic() + 10
    while damaged.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not damaged.exists() and len(list((root / "quarantine").iterdir())) == 1
    assert not whole.exists() and store.stats()["write_errors"] == 0
    later.close()
