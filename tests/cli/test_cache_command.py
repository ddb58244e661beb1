"""`mlx_lm.tiered cache` over a directory with sound, damaged and foreign files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_lm_tiered.cli import main
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.cold.meta import Meta, TensorSpec

FINGERPRINT = "ab" * 16


def entry(root: Path, tokens: list[int]) -> Path:
    """A sound entry without any caches: tokens and one tensor."""
    data = [np.array(tokens, "<i8").tobytes(), bytes(range(256)) * 64]
    specs = (TensorSpec("x", "U8", (len(data[1]),)),)
    meta = Meta(FINGERPRINT, "", len(tokens), specs, [], provenance={"model": "tiny"})
    header = fmt.layout(meta)
    fmt.seal(header, [fmt.digest(part) for part in data])
    path = Directory(root, 0).entry_path(FINGERPRINT, "", np.array(tokens, ">i8").tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(header) + b"".join(data))
    return path


@pytest.fixture
def three(cache_dir: Path) -> list[Path]:
    paths = [entry(cache_dir, list(range(n))) for n in (5, 70, 900)]
    (cache_dir / "notes.txt").write_text("not ours")
    return paths


def run(capsys, *argv: object) -> tuple[int, str]:
    code = main(["cache", *map(str, argv)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "verify", "clear", "show", "export", "import"])
def test_commands_that_need_no_mlx_load_none(three: list[Path], cache_dir: Path, tmp_path: Path, command: str):
    argv = {"show": [three[0].name[:6], cache_dir], "export": ["--all", cache_dir, "-o", tmp_path / "x.tar"], "import": [tmp_path / "made.tar", cache_dir]}
    if command == "import":
        main(["cache", "export", "--all", str(cache_dir), "-o", str(tmp_path / "made.tar")])
    script = "import sys\nfrom mlx_lm_tiered.cli import main\ncode = main(['cache', *sys.argv[1:]])\n"
    script += "print(code, [name for name in ('mlx', 'mlx.core', 'mlx_lm', 'transformers', 'tokenizers') if name in sys.modules])"
    words = [command, *map(str, argv.get(command, [cache_dir]))]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_list(three: list[Path], cache_dir: Path, capsys):
    code, out = run(capsys, "list", cache_dir, "--json")
    listed = json.loads(out)
    assert code == 0
    assert sorted(e["tokens"] for e in listed) == [5, 70, 900]
    assert {e["fingerprint"] for e in listed} == {FINGERPRINT}
    assert sum(e["bytes"] for e in listed) >= sum(path.stat().st_size for path in three)
    code, out = run(capsys, "list", cache_dir)
    assert code == 0 and "900" in out and "3 entries" in out and "0 damaged" in out


def test_the_directory_may_come_from_the_environment(three: list[Path], cache_dir: Path, capsys, monkeypatch):
    monkeypatch.setenv("MLX_LM_TIERED_SSD_CACHE", str(cache_dir))
    assert len(json.loads(run(capsys, "list", "--json")[1])) == 3


@pytest.mark.parametrize("place", ["header", "tokens", "last byte"])
def test_verify_finds_one_flipped_bit(three: list[Path], cache_dir: Path, capsys, place: str):
    assert run(capsys, "verify", cache_dir)[0] == 0
    raw = bytearray(three[1].read_bytes())
    raw[{"header": 200, "tokens": 4096, "last byte": len(raw) - 1}[place]] ^= 1
    three[1].write_bytes(raw)
    code, out = run(capsys, "verify", cache_dir, "--json")
    assert code == 1
    damaged = [e for e in json.loads(out) if e["fault"]]
    assert [e["file"] for e in damaged] == [three[1].name] and "checksum" in damaged[0]["fault"]
    assert three[1].exists()


def test_clear_takes_what_is_ours_only(three: list[Path], cache_dir: Path, capsys):
    code, out = run(capsys, "clear", cache_dir, "--dry-run", "--json")
    would = json.loads(out)
    assert code == 0 and would["entries"] == 3 and all(path.exists() for path in three)
    code, out = run(capsys, "clear", cache_dir, "--json")
    assert code == 0 and json.loads(out) == would | {"dry_run": False}
    assert not any(path.exists() for path in three)
    assert (cache_dir / "notes.txt").read_text() == "not ours"
