"""``mlx_lm.tiered demo``: what it prints."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from mlx_lm_hooks import PluginError, UsageError
from mlx_lm_tiered import openblas, versions
from mlx_lm_tiered.bench.client import RequestFailed
from mlx_lm_tiered.bench.server import ServerFailed

from . import model as source
from .run import default_prompt_tokens, run, table, write_json


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepare() -> int:
    """Fetch the model; its directory is the only line on standard output."""
    print(_prepared())
    return 0


def _prepared() -> Path:
    try:
        return source.prepare(say=_say)
    except source.ModelUnavailable as error:
        raise PluginError(str(error)) from error


def demo(model: str | None, directory: Path | None, prompt_tokens: int | None, json_file: Path | None) -> int:
    """Run it and print the table; 1 when answers differ or nothing was reused."""
    if json_file is not None and (json_file.is_dir() or not os.access(json_file.parent, os.W_OK)):
        raise UsageError(f"{json_file} cannot be written to")
    if directory is not None and directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    if directory is not None:
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory} cannot be made: {error.strerror}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"{directory} cannot be written to")
    path = Path(model) if model is not None else _prepared()
    if versions.on_cpu() and sys.platform.startswith("linux"):
        found = openblas.find()
        _say(f"OpenBLAS: {found}" if found else openblas.INSTALL_HINT + " (the chat is shorter for it)")
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-demo-") as scratch:
        place = directory.absolute() if directory is not None else Path(scratch) / "cold"
        try:
            outcome = run(path, place, prompt_tokens or default_prompt_tokens(), _say)
        except (RequestFailed, ServerFailed) as error:
            _say(f"mlx_lm.tiered: {error}")
            return 1
    print(f"\n{table(outcome)}\n")
    print(f"The server saved and stopped in {outcome.stop_s:.1f} s, and was ready again {outcome.start_s:.1f} s after its start.")
    if json_file is not None:
        write_json(outcome, json_file)
    for fault in outcome.faults:
        _say(f"mlx_lm.tiered: {fault}")
    return 1 if outcome.faults else 0
