"""A server whose directory fails in one way after another: it serves on with right tokens, warns once, counts, and caches again afterwards.

The calls of the real process are made to fail at the boundary of the system
(`support/injector`); the full disk is a real one where the system lets us mount.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.models import document
from support.server import Server, stock, tiered, user

INJECTOR = Path(__file__).resolve().parents[1] / "support" / "injector"
WRITING = ("pwrite", "ftruncate", "fsync")
CHANGING = ("open", "mkdir", "rename", "unlink", "utime")


class Place:
    """A directory whose system calls fail as told."""

    def __init__(self, directory: Path, control: Path):
        self.directory, self.control = directory, control
        self.env = {"PYTHONPATH": f"{INJECTOR}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "INJECT_UNDER": str(directory), "INJECT_CONTROL": str(control)}
        self.mounted = False

    def set(self, **faults: str | int) -> None:
        partial = self.control.with_suffix(".new")
        partial.write_text(json.dumps(faults))
        partial.rename(self.control)

    def fill(self) -> None:
        """No byte is left on the disk."""
        if not self.mounted:
            self.set(pwrite="ENOSPC", ftruncate="ENOSPC")
            return
        with open(self.directory.parent / "filler", "wb", buffering=0) as file:
            with pytest.raises(OSError, match="space"):
                while True:
                    file.write(bytes(4096))

    def heal(self) -> None:
        self.set()
        (self.directory.parent / "filler").unlink(missing_ok=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    disk = tmp_path / "disk"
    disk.mkdir()
    found = Place(disk / "cold", tmp_path / "control")
    if sys.platform == "linux" and os.geteuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", disk]
        found.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield found
    if found.mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@contextmanager
def warnings(server: Server, count: int) -> Iterator[None]:
    """That many warnings are written in the block."""
    before = server.log()
    yield
    said = [line for line in server.log()[len(before) :].splitlines() if " WARNING " in line]
    assert len(said) == count, said


def test_each_way_of_failing_in_turn(tiny_llama: Path, tmp_path: Path, place: Place) -> None:
    asked: list[tuple[str, list[int]]] = []
    with tiered(tiny_llama, place.directory, "--ssd-restore", "always", log=tmp_path / "log", env=place.env) as server:

        def ask(number: int) -> int:
            question = f"{number} " + document(1500, start=700 * number)
            answer = server.chat(user(question), tokens=True, max_tokens=8)
            asked.append((question, answer.tokens))
            return answer.cached_tokens

        def flushed() -> bool:
            return server.flush()[0] == 200

        def drained() -> bool:
            return server.request("POST", "/admin/drain", b"")[0] == 200

        def counted(name: str) -> int:
            return server.stats()["ssd"][name]

        ask(0)
        assert flushed()
        failing: list[tuple[str, Callable[[], None]]] = [
            ("the disk is full", place.fill),
            ("EIO", lambda: place.set(**dict.fromkeys(WRITING, "EIO"))),
            ("EIO when syncing", lambda: place.set(fsync="EIO")),
            ("EACCES", lambda: place.set(**dict.fromkeys(CHANGING, "EACCES"))),
            ("no list of the directory", lambda: place.set(scandir="EIO")),
        ]
        for number, (what, fail) in enumerate(failing, 1):
            errors = counted("write_errors")
            with warnings(server, 1):
                fail()
                assert ask(number) < 100
                assert not flushed() and not flushed(), what
                assert ask(number) > 300, what  # RAM is not the disk's business
            assert counted("write_errors") > errors, what
            place.heal()
            with warnings(server, 0):
                assert flushed() and drained(), what
                assert ask(number) > 300 and server.stats()["hits_by_tier"]["ssd"] >= number, what

        # What cannot be read is computed, and stored again.
        assert drained()
        with warnings(server, 1):
            place.set(pread="EIO", preadv="EIO")
            for number in (1, 2, 3):
                assert ask(number) < 100
        assert counted("read_errors") >= 3
        place.heal()
        with warnings(server, 0):
            assert flushed() and drained()
            assert ask(1) > 300

        # These are no faults, and nobody is told.
        with warnings(server, 0):
            for number, harmless in ((6, {"pwrite": "short", "pread": "short", "preadv": "short"}), (7, {"time": -86400})):
                place.set(**harmless)
                ask(number)
                assert flushed() and drained()
                hits = server.stats()["hits_by_tier"]["ssd"]
                assert ask(number) > 300 and server.stats()["hits_by_tier"]["ssd"] == hits + 1
        assert counted("corrupt") == 0
        place.heal()
    with stock(tiny_llama, tmp_path / "stock.log") as reference:
        for question, tokens in dict(asked).items():
            assert reference.chat(user(question), tokens=True, max_tokens=8).tokens == tokens
    assert all(tokens == dict(asked)[question] for question, tokens in asked)
