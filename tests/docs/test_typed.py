"""The three packages, and a plugin written against the contract, are typed, strictly."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from doc_pages import DOCS, ROOT, blocks

import mlx_lm_hooks


def test_type_checkers_see_every_name():
    tree = ast.parse(Path(mlx_lm_hooks.__file__).read_text(encoding="utf-8"))
    found = {name.asname: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 for name in node.names}
    assert found == mlx_lm_hooks._HOMES


def test_the_contract_and_the_example_are_typed(tmp_path: Path):
    for block in blocks(DOCS / "write-a-plugin.md"):
        if block.language == "python":
            (tmp_path / block.title).parent.mkdir(exist_ok=True)
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
        + ["--follow-imports", "silent", "-p", "shelf", "-p", "mlx_lm_hooks"],
        cwd=ROOT, env={**os.environ, "MYPYPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_packages_are_typed(tmp_path: Path):
    """As `make types` has it."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "MYPYPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "hooks", "patches"))}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
