"""The site is built without a warning: every page is in its menu, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

import mlx_lm_hooks
from mlx_lm_tiered import settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def words(page: Path) -> str:
    """The text of a page without its marks."""
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


def test_pages_ask_no_other_machine_for_anything(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30 and not list(site.rglob("*.py*"))
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text(encoding="utf-8"))
        assert loaded == [], page


def test_the_reference_is_made_from_the_code(site: Path):
    types = words(site / "reference/types/index.html")
    assert [name for name in mlx_lm_hooks.__all__ if isinstance(getattr(mlx_lm_hooks, name), type) and name != "Plugins" and f"{name}&para;" not in types] == []
    commands = words(site / "reference/commands/index.html")
    for command in ("doctor", "cache probe", "cache import", "bench restart", "bench kernels"):
        assert f"usage: mlx_lm.tiered {command}" in commands
    table = words(site / "settings/index.html")
    assert [flag for flag, *_ in settings.table() if flag not in table] == []
    assert "0.1.0" in words(site / "reference/changes/index.html")
