"""Durable means on the medium: what is synced, how, and in which order."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest
from cold_helpers import grown, job, save, scanned

from mlx_lm_tiered.cold import writer


def inode(path):
    return path.stat().st_ino


@pytest.fixture
def macos(monkeypatch):
    """A system whose fsync stops at the drive's own cache; which files are told to go on to the medium, by inode."""
    synced = []

    def control(fd, command):
        assert command == 51
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(writer.sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("fsync alone does not reach the medium"))
    return synced


def test_macos_is_told_to_reach_the_medium_with_files_and_every_folder_on_the_way(tmp_path, macos):
    store = scanned(tmp_path / "new" / "c")
    assert {inode(tmp_path), inode(tmp_path / "new"), inode(store.root)} <= set(macos), "folders that are new themselves"
    macos.clear()
    path = save(store, job(range(30), grown(30)))
    assert macos[-3:] == [inode(path), inode(path.parent), inode(store.root / "v1")], "the bytes before the name"
    macos.clear()
    second = save(store, job(range(60), grown(60)))
    assert macos == [inode(second), inode(second.parent)]


@pytest.mark.parametrize(("error", "enough"), [(errno.ENOTSUP, True), (errno.ENOTTY, True), (errno.EIO, False), (errno.ENOSPC, False)])
def test_only_where_the_volume_knows_no_better_is_fsync_enough(tmp_path, monkeypatch, error, enough):
    store = scanned(tmp_path / "c")
    synced = []

    def control(fd, command):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(writer.sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", synced.append)
    if enough:
        assert save(store, job(range(30))).exists() and len(synced) >= 2
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            save(store, job(range(30)))
        assert store.stats()["entries"] == 0 and synced == []
