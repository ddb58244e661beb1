"""A directory that is full, read-only, missing, in the way, or goes away while in use; and the cap."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cold_helpers import FINGERPRINT, disk_bytes, job, plain, restore, same, save, scanned

from mlx_lm_tiered.cold import writer
from mlx_lm_tiered.cold.directory import DirectoryFull
from mlx_lm_tiered.cold.format import file_size
from mlx_lm_tiered.cold.jobs import describe
from mlx_lm_tiered.cold.store import ColdStore, Unavailable
from mlx_lm_tiered.index.keys import token_key

HERE = Path(__file__).parent


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_all_files_stay_below_the_cap_under_a_random_workload(tmp_path, monkeypatch):
    root, cap = tmp_path / "c", 1_200_000
    draw = random.Random(3)
    highest = 0
    write_all = writer._write_all

    def watched(fd, data, at):
        nonlocal highest
        write_all(fd, data, at)
        highest = max(highest, sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir()))

    store = scanned(root, cap)
    monkeypatch.setattr(writer, "_write_all", watched)
    (root / "notes.txt").write_bytes(b"x" * 50_000)
    refused = 0
    for step in range(120):
        tokens = draw.randrange(1, 900)
        mine = [draw.randrange(4), *range(tokens)]
        try:
            path = save(store, job(mine, plain(len(mine), layers=draw.randrange(1, 12))))
            if draw.random() < 0.1:
                path.write_bytes(path.read_bytes()[:-3])
                assert restore(store, mine) is None
        except DirectoryFull:
            refused += 1
        assert disk_bytes(root) <= cap
        if step % 30 == 29:
            store.close()
            store = scanned(root, cap)
    stats = store.stats()
    assert highest <= cap and highest > cap * 0.6
    assert refused > 0 and stats["entries"] > 1
    assert (root / "notes.txt").exists()


def test_an_entry_larger_than_the_cap_is_refused_and_evicts_nothing(tmp_path):
    store = scanned(tmp_path / "c", 400_000)
    path = save(store, job(range(100)))
    with pytest.raises(DirectoryFull):
        save(store, job(range(5000, 9000)))
    assert path.exists() and store.stats()["skipped_too_large"] == 1 and store.stats()["evictions"] == 0


def test_damaged_files_are_evicted_first_and_foreign_ones_never(tmp_path):
    root, cap = tmp_path / "c", 400_000
    store = scanned(root, cap)
    (root / "theirs.bin").write_bytes(b"x" * 100_000)
    older = save(store, job(range(100)))
    damaged = save(store, job(range(1000, 1400)))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert restore(store, range(1000, 1400)) is None
    assert len(list((root / "quarantine").iterdir())) == 1
    save(store, job(range(2000, 2400)))
    assert list((root / "quarantine").iterdir()) == [] and older.exists()
    save(store, job(range(3000, 3400)))
    assert not older.exists() and (root / "theirs.bin").exists()


def test_an_entry_counts_in_full_from_its_first_byte(tmp_path):
    """So that two processes that write at the same time cannot both take the last room."""
    store = scanned(tmp_path / "c")
    meta, tensors = describe(job(range(300)))
    before = disk_bytes(store.root)
    writer = store.begin(FINGERPRINT, "", token_key(range(300)), meta)
    assert disk_bytes(store.root) - before == file_size(meta) > 80_000
    writer.abort()
    assert disk_bytes(store.root) == before


def test_the_file_is_on_the_disk_before_it_has_its_name_and_the_name_afterwards(tmp_path, monkeypatch):
    store = scanned(tmp_path / "c")
    calls = []
    rename = os.rename

    def full_sync(fd):
        calls.append(("sync", stat.S_ISDIR(os.fstat(fd).st_mode)))

    monkeypatch.setattr(writer, "full_sync", full_sync)
    monkeypatch.setattr(os, "rename", lambda *paths: (calls.append(("rename", None)), rename(*paths)))
    path = save(store, job(range(40)))
    assert calls[:3] == [("sync", False), ("rename", None), ("sync", True)]
    assert path.exists()


def test_a_smaller_cap_is_met_at_the_start(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    for i in range(8):
        save(store, job(range(1000 * i, 1000 * i + 300)))
    store.close()
    cap = disk_bytes(root) // 2
    store = scanned(root, cap)
    assert disk_bytes(root) <= cap and 1 <= store.stats()["evictions"] < 8


def test_a_full_disk_is_one_warning_and_recovers(tmp_path, monkeypatch, caplog):
    clock = Clock()
    store = ColdStore(tmp_path / "c", 1 << 30, clock=clock)
    saved = save(store, job(range(40)))
    pwrite = os.pwrite

    def full(fd, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.INFO, "mlx_lm_tiered"):
        for _ in range(3):
            with pytest.raises(OSError):
                save(store, job(range(500, 540)))
            assert list((tmp_path / "c" / "tmp").iterdir()) == []
        assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
        with pytest.raises(Unavailable):
            save(store, job(range(500, 540)))
        monkeypatch.setattr(os, "pwrite", pwrite)
        clock.now += 31
        save(store, job(range(500, 540)))
    assert "works again" in caplog.text
    assert saved.exists() and store.stats()["write_errors"] >= 1


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting needs root on Linux")
def test_a_really_full_file_system(tmp_path):
    root = tmp_path / "c"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k,mode=700", "tmpfs", root], capture_output=True).returncode:
        pytest.skip("this system does not let us mount")
    try:
        store = scanned(root)
        caches = plain(300)
        save(store, job(range(300), caches))
        with pytest.raises(OSError) as caught:
            for i in range(1, 20):
                save(store, job(range(1000 * i, 1000 * i + 700)))
        assert caught.value.errno == errno.ENOSPC
        assert list((root / "tmp").iterdir()) == []
        assert same(restore(store, range(300)), caches)
        store.close()
    finally:
        subprocess.run(["umount", root], check=True)


def test_a_file_size_limit_ends_a_save_cleanly(tmp_path):
    """A write the system really refuses, half way through: EFBIG from RLIMIT_FSIZE, in a child process."""
    script = """
import pathlib, resource, signal, sys
from cold_helpers import job, plain, restore, save, scanned
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = pathlib.Path(sys.argv[1])
store = scanned(root)
save(store, job(range(20)))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save(store, job(range(1000, 3000)))
except OSError as error:
    print(error.errno)
assert list((root / "tmp").iterdir()) == []
assert restore(store, range(20)) is not None
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    result = subprocess.run([sys.executable, "-c", script, tmp_path / "c"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == errno.EFBIG


def test_a_file_in_place_of_the_directory(tmp_path, caplog):
    root = tmp_path / "c"
    root.write_text("in the way")
    clock = Clock()
    with caplog.at_level(logging.WARNING, "mlx_lm_tiered"):
        store = ColdStore(root, 1 << 30, clock=clock)
        store.wait_scanned(10)
        assert restore(store, range(40)) is None
        store.wait_scanned(10)
        for _ in range(3):
            clock.now += 31
            with pytest.raises(OSError):
                save(store, job(range(40)))
    assert len(caplog.records) == 1
    root.unlink()
    clock.now += 31
    save(store, job(range(40)))
    assert restore(store, range(40)) is not None


def test_a_read_only_directory_is_read_and_not_written(tmp_path):
    """As another user in a child process when we are root, whom modes do not bind."""
    root = tmp_path / "c"
    script = """
import os, pathlib, sys
from cold_helpers import FINGERPRINT, ColdStore, job, plain, restore, same, save, scanned
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = pathlib.Path(sys.argv[1])
caches = plain(40)
store = scanned(root)
save(store, job(range(40), caches))
store.close()
for path in [*root.rglob("*"), root]:
    path.chmod(0o500 if path.is_dir() else 0o400)
store = ColdStore(root, 1 << 30)
store.wait_scanned(30)  # the start has found out that it cannot write
store.attach(FINGERPRINT)
store.wait_scanned(30)
assert same(restore(store, range(40)), caches)
try:
    save(store, job(range(100, 140)))
    print("written")
except OSError as error:
    print(error.errno)
for path in [root, *root.rglob("*")]:
    path.chmod(0o700 if path.is_dir() else 0o600)
"""
    for folder in [tmp_path, *tmp_path.parents][:4]:
        folder.chmod(0o777 if folder == tmp_path else folder.stat().st_mode | 0o011)
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script, root], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # Denied, or not even tried because the start was denied already.
    assert result.stdout in (f"{errno.EACCES}\n", "None\n")


def test_a_directory_deleted_while_running_comes_back(tmp_path):
    root = tmp_path / "c"
    clock = Clock()
    store = ColdStore(root, 1 << 30, clock=clock)
    save(store, job(range(40)))
    shutil.rmtree(root)
    assert restore(store, range(40)) is None
    caches = plain(40)
    save(store, job(range(40), caches))
    assert same(restore(store, range(40)), caches)
    # The new directory knows us as a live writer again.
    assert len(list((root / "writers").iterdir())) == 1


def test_a_directory_deleted_during_a_save_is_an_error_and_then_works(tmp_path, monkeypatch):
    root = tmp_path / "c"
    clock = Clock()
    store = ColdStore(root, 1 << 30, clock=clock)
    sync = writer.full_sync

    def deleting(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):  # the entry's file, not a folder that is made
            shutil.rmtree(root)
        sync(fd)

    monkeypatch.setattr(writer, "full_sync", deleting)
    with pytest.raises(FileNotFoundError):
        save(store, job(range(40)))
    monkeypatch.setattr(writer, "full_sync", sync)
    clock.now += 31
    save(store, job(range(40)))
    assert restore(store, range(40)) is not None


def test_a_clock_set_back_does_not_turn_the_order_of_uses_round(tmp_path, monkeypatch):
    root = tmp_path / "c"
    tomorrow = time.time_ns() + 86_400 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: tomorrow)
        store = scanned(root)
        older, newer = (save(store, job(range(start, start + 100), plain(100))) for start in (0, 1000))
        store.close()
    store = scanned(root, disk_bytes(root) + 100_000)
    ours = [save(store, job(range(start, start + 100), plain(100))) for start in range(2000, 6000, 1000)]
    assert not older.exists() and not newer.exists() and ours[-1].exists() and ours[-2].exists()


def test_a_time_stamp_from_nowhere_is_not_gone_on_from(tmp_path):
    root = tmp_path / "c"
    store = scanned(root)
    path = save(store, job(range(100)))
    store.close()
    os.utime(path, ns=(1 << 62, 1 << 62))
    if path.stat().st_mtime_ns < 1 << 62:
        pytest.skip("this file system has no such time")
    store = scanned(root)
    assert save(store, job(range(1000, 1100))).stat().st_mtime_ns < time.time_ns() + 10**9


def test_what_a_kill_left_of_a_memo_goes_at_the_next_start(tmp_path):
    root = tmp_path / "c"
    scanned(root).close()
    names = [f"{name}.json.{digits}.tmp" for name, digits in (("rates", "0" * 8), ("identities", "ab" * 4), ("rates", "1" * 8))]
    for name, age in zip([*names, "theirs.json.tmp"], (3600, -3600, 0, 3600), strict=True):
        (root / name).write_text("{")
        os.utime(root / name, (time.time() - age, time.time() - age))
    scanned(root).close()
    # One that is written just now is another process's.
    assert {path.name for path in root.glob("*.tmp")} == {names[2], "theirs.json.tmp"}
