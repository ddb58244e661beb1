"""`mlx_lm.tiered doctor`: sound here, and exit code 1 with a sentence where something cannot work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlx_lm_hooks import SeamReport
from mlx_lm_tiered import doctor
from mlx_lm_tiered.cli import main


class Host:
    """A host in a given state."""

    def __init__(self, state: str = "ok", start_up: str = "ok"):
        self.state, self.start = state, start_up

    def seams(self) -> list[SeamReport]:
        return [SeamReport("server.prompt_cache", self.state, "prefix cache", "the signature changed")]

    def start_up(self) -> dict[str, str]:
        return {"state": self.start, "path": "x.pth", "detail": "hidden by a flag" if self.start == "hidden" else ""}


def test_all_is_well_here(cache_dir: Path, capsys):
    code = main(["doctor", "--json", "--ssd-cache", str(cache_dir)])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["problems"], found["ok"]) == (0, [], True)
    assert found["start_up"]["state"] == "ok"
    assert found["seams"] and {seam["state"] for seam in found["seams"]} == {"ok"}
    assert "tiered" in [plugin["name"] for plugin in found["plugins"]]
    assert found["versions"]["mlx-lm"] and found["device"]
    assert found["cache"]["exists"] is False and found["cache"]["writable"] is True
    assert main(["doctor"]) == 0
    assert "all that was asked for can work" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["mismatch", "missing", "unsupported"])
def test_a_seam_that_does_not_fit_is_a_problem(monkeypatch, state: str):
    monkeypatch.setattr(doctor, "find_host", lambda: Host(state))
    report = doctor.examine(None, {})
    assert report.problems == ["seam server.prompt_cache (prefix cache): the signature changed"]
    assert "PROBLEM" in doctor.describe(report)


def test_an_unknown_body_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "find_host", lambda: Host("unknown-body"))
    report = doctor.examine(None, {})
    assert not report.problems and any("server.prompt_cache" in text for text in report.warnings)


def test_a_hidden_start_up_file_is_a_problem_with_a_way_round(monkeypatch):
    monkeypatch.setattr(doctor, "find_host", lambda: Host(start_up="hidden"))
    (problem,) = doctor.examine(None, {}).problems
    assert "hidden by a flag" in problem and "mlx_lm.tiered serve" in problem


def test_a_plugin_that_is_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "find_host", Host)
    (problem,) = doctor.examine(None, {"MLX_LM_PLUGINS": "tiered,nonesuch"}).problems
    assert "'nonesuch'" in problem


def test_a_directory_below_a_file(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "find_host", Host)
    (tmp_path / "file").write_text("")
    (problem,) = doctor.examine(tmp_path / "file" / "cache", {}).problems
    assert "is not a directory" in problem


def test_what_lies_in_the_directory(monkeypatch, cache_dir: Path):
    monkeypatch.setattr(doctor, "find_host", Host)
    os.makedirs(cache_dir / "v1" / ("ab" * 16))
    (cache_dir / "v1" / ("ab" * 16) / ("cd" * 16 + ".safetensors")).write_bytes(b"x" * 5000)
    (cache_dir / "stranger.bin").write_bytes(b"x")
    cache_dir.chmod(0o755)
    report = doctor.examine(cache_dir, {})
    cache = report.facts["cache"]
    assert (cache["entries"], cache["foreign"], cache["owner_only"]) == (1, 1, False)
    assert cache["bytes"] >= 5000 and cache["free_bytes"] > 0
    assert any("chmod 700" in text for text in report.warnings)
    assert any("stranger.bin" in text for text in report.warnings)
    cache_dir.chmod(0o700)
    assert doctor.examine(cache_dir, {}).facts["cache"]["owner_only"] is True
