"""``cache push``, ``pull`` and ``expire`` against a directory as a store."""

from __future__ import annotations

import json
import os
import time

import pytest

from cold_helpers import grown, restore, same, scanned
from mlx_lm_tiered.cli import main
from mlx_lm_tiered.cold.store import ColdStore
from shared_helpers import KEY, NAMES, TOKENS, conversation

OTHER = [*range(3000, 3400)]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command on the store; returns its exit code and what it printed, as JSON."""
    monkeypatch.setenv("MLX_LM_TIERED_SHARED_CACHE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLX_LM_TIERED_SHARED_CACHE_TEAM", "a key")

    def run(*argv: object) -> tuple[int, dict]:
        code = main(["cache", *map(str, argv), "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else {}

    return run


@pytest.fixture
def filled(tmp_path):
    """A directory with a conversation of two files, another one, and one that is too short."""
    cold = ColdStore(tmp_path / "a", 1 << 30)
    conversation(cold, 400, 900)
    conversation(cold, 400, tokens=OTHER, seed=1)
    conversation(cold, 100, tokens=[9] * 100, seed=2)
    cold.close()
    return tmp_path / "a"


def test_all_is_pushed_once_and_pulled_whole(command, filled, tmp_path):
    code, told = command("push", "--all", filled, "--dry-run")
    assert (code, told["entries"], told["already_there"]) == (0, 2, 0) and not (tmp_path / "store" / "v1").exists()
    size = told["bytes"]
    code, told = command("push", "--all", filled)
    assert (code, told["entries"], told["bytes"]) == (0, 2, size)
    assert command("push", "--all", filled)[1] | {"files": []} == {"entries": 0, "bytes": 0, "already_there": 2, "dry_run": False, "files": [], "left_out": []}

    code, told = command("pull", "--all", tmp_path / "b", "--dry-run")
    assert (code, told["entries"], told["bytes"]) == (0, 2, size) and not list((tmp_path / "b").rglob("*.safetensors"))
    one = next(file for file in told["files"] if file["tokens"] == 900)
    assert one["entry"] == NAMES.entry(KEY)
    assert command("pull", one["entry"][:8], tmp_path / "b")[1]["entries"] == 1
    code, told = command("pull", "--all", tmp_path / "b")
    assert (code, told["entries"], told["already_there"]) == (0, 1, 1)
    store = scanned(tmp_path / "b")
    restored = restore(store, TOKENS)
    assert restored is not None and same(restored, grown(900))
    store.close()


def test_one_entry_is_pushed_with_what_it_continues(command, filled):
    whole = {path.name[:32]: path for path in filled.rglob("*.safetensors")}
    segment = next(path for path in whole.values() if "-" in path.name)
    code, told = command("push", segment.name[:16], filled)
    assert (code, told["entries"]) == (0, 1) and told["bytes"] == sum(path.stat().st_size for path in (segment, whole[segment.stem[33:]]))


def test_damage_is_neither_pushed_nor_pulled(command, filled, tmp_path):
    segment = next(path for path in filled.rglob("*.safetensors") if "-" in path.name)
    data = bytearray(segment.read_bytes())
    data[-10] ^= 1
    segment.write_bytes(data)
    code, told = command("push", "--all", filled)
    assert (code, told["entries"], len(told["left_out"])) == (1, 1, 1)
    for piece in (tmp_path / "store").rglob("pieces/*"):
        data = bytearray(piece.read_bytes())
        data[len(data) // 2] ^= 1
        piece.write_bytes(data)
    code, told = command("pull", "--all", tmp_path / "b")
    assert (code, told["entries"], len(told["refused"])) == (1, 0, 1) and not list((tmp_path / "b").rglob("*.safetensors"))


def test_what_is_old_or_too_much_is_deleted(command, filled, tmp_path):
    command("push", "--all", filled)
    assert command("expire")[1]["gone"] == 0
    for path in (tmp_path / "store").rglob("entries/*"):
        if path.name == NAMES.entry(KEY):
            os.utime(path, (time.time() - 40 * 86400,) * 2)
    assert command("expire", "--dry-run")[1]["gone"] == 1
    code, told = command("expire", "--shared-cache-ttl", "50d", "--shared-cache-max", "1")
    assert (code, told["gone"]) == (0, 2) and not [path for path in (tmp_path / "store").rglob("*/*/*/*/*") if path.is_file()]


def test_what_cannot_be_meant_is_one_sentence(command, filled, monkeypatch, capsys):
    assert main(["cache", "push", str(filled)]) == 2 and main(["cache", "pull", str(filled), "--shared-cache", "ftp://x/y"]) == 2
    assert main(["cache", "push", "zzzz", str(filled)]) == 2 and main(["cache", "pull", "zzzz", str(filled)]) == 2
    monkeypatch.delenv("MLX_LM_TIERED_SHARED_CACHE")
    assert main(["cache", "expire"]) == 2
    assert main(["cache", "expire", "--shared-cache", "http://127.0.0.1:9/x"]) == 1, "nobody listens there"
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 6 and all(line.startswith("mlx_lm.tiered: ") for line in lines)
