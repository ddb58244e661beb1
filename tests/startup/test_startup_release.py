"""What is released: the source, the wheel made of it, and that it serves with the oldest mlx-lm that it says it supports.

With the newest one everything else is tested: pip has installed it beside these tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.models import document
from support.server import Server

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlx_lm_hooks", "mlx_lm_patches", "mlx_lm_tiered")


def oldest() -> str:
    """The lower bound of mlx-lm in `pyproject.toml`."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    (mlx_lm,) = (wanted for wanted in map(Requirement, project["dependencies"]) if wanted.name == "mlx-lm")
    (bound,) = (part.version for part in mlx_lm.specifier if part.operator == ">=")
    return bound


def test_the_source(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "Makefile", "mkdocs.yml", "docs/index.md", "tests/conftest.py", "tests/models/tiny-llama/config.json"} <= names
    assert [name for name in names if name.startswith((".ci", ".venv", ".git/")) or name.endswith(".pyc")] == []


def test_the_wheel(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (Parser().parsestr(archive.read(name).decode()) for name in names if name.endswith(".dist-info/METADATA"))
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for folder in (PROJECT / "hooks", PROJECT / "patches", PROJECT):
        for package in PACKAGES:
            files = {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*") if path.is_file() and path.suffix != ".pyc"}
            assert files <= names  # templates, styles and the kernels' texts, too
    assert {"mlx_lm_tiered.pth", "mlx_lm_tiered.start"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if not name.partition("/")[0].endswith((".dist-info", ".pth", ".start"))} == set(PACKAGES)
    assert wheel.name.startswith(f"mlx_lm_tiered-{metadata['Version']}-")


def test_a_tag_is_the_version(tmp_path: Path):
    """Of a commit that has one; one behind it is on the way to the next, and what is no clone has the version that is written down."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments], cwd=tmp_path, check=True, capture_output=True)

    def version() -> str:
        return subprocess.run([sys.executable, "-m", "hatchling", "version"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, tmp_path)
    written = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
    assert version() == written
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "one")
    git("tag", "v1.2.3")
    assert version() == "1.2.3"
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    assert version() == "1.2.4.dev1"


def test_changes_are_gathered_at_a_release(tmp_path: Path):
    """Every file of `changelog.d` has a kind that is known, and becomes a line of the section, in front of those before."""
    known = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["towncrier"]["fragment"]
    there = [path for path in (PROJECT / "changelog.d").iterdir() if path.name not in ("README.md", "template.md.jinja")]
    assert all(path.suffix == ".md" and path.suffixes[-2][1:] in known for path in there), there
    shutil.copytree(PROJECT / "changelog.d", tmp_path / "changelog.d")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, tmp_path)
    for kind in known:
        (tmp_path / "changelog.d" / f"+{kind}.{kind}.md").write_text(f"Something was {kind}.\nOn two lines.\n")
    (tmp_path / "changelog.d" / "7.fixed.md").write_text("Seven.")
    subprocess.run([sys.executable, "-m", "towncrier", "build", "--yes", "--version", "99.0.0", "--date", "2030-01-02"], cwd=tmp_path, check=True, capture_output=True)
    text = (tmp_path / "CHANGELOG.md").read_text()
    assert text.index("## 99.0.0 (2030-01-02)") < text.index("## 0.1.0")
    assert text.endswith((PROJECT / "CHANGELOG.md").read_text().partition("<!-- releases -->")[2].lstrip("\n"))
    for kind, names in known.items():
        assert f"\n{names['name']}\n" in text and f"- Something was {kind}.\n  On two lines.\n" in text
    assert "- Seven. (#7)\n" in text
    assert sorted(path.name for path in (tmp_path / "changelog.d").iterdir()) == ["README.md", "template.md.jinja"]


@pytest.fixture(scope="module")
def old(make_environment, wheel: Path):
    return make_environment("oldest-env", str(wheel), f"mlx-lm=={oldest()}")


def test_the_oldest_supported_mlx_lm(old, tiny_llama: Path, tmp_path: Path):
    where = old.run([old.python, "-c", "import importlib.metadata as m, mlx_lm; print(m.version('mlx-lm'), mlx_lm.__file__)"]).stdout.split()
    assert Version(where[0]) == Version(oldest()) and where[1].startswith(str(old.path))
    report = json.loads(old.run([str(old.path / "bin/mlx_lm.tiered"), "doctor", "--json"]).stdout)
    assert {seam["state"] for seam in report["seams"]} == {"ok"}, report["seams"]
    answers = []
    for run in range(2):
        with Server(
            tiny_llama,
            tmp_path / f"{run}.log",
            ["--plugin", "tiered", "--ssd-cache", str(tmp_path / "cold"), "--ssd-restore", "always"],
            command=old.form("script", "server"),
            env={**old.environ(), "MLX_LM_PLUGINS": None},
        ) as server:
            answers += [server.complete(document(600), max_tokens=8) for _ in range(2)]
            assert server.terminate() == 0
    assert len({answer.text for answer in answers}) == 1
    assert [answer.cached_tokens for answer in answers] == [0, *[answers[0].prompt_tokens - 1] * 3]
