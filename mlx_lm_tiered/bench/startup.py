"""What the start-up file costs a script that has nothing to do with mlx-lm.

Python is started in turn with and without it, each time with the same import path,
and does nothing. ``-S`` keeps the environment's own files out of both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_hooks import PluginError, find_host

_SCRIPT = "import site, sys; site.addsitedir(sys.argv[1])"


def run(repeats: int) -> dict[str, Any]:
    """Measure it; milliseconds. Raises PluginError when there is no start-up file."""
    state = find_host().start_up()
    if not state.get("path") or not Path(state["path"]).is_file():
        raise PluginError("the start-up file is not installed; reinstall mlx-lm-tiered")
    file = Path(state["path"])
    imported = re.search(r"(\w+)\.finder", file.read_text())
    if imported is None:
        raise PluginError(f"{file} is not this version's start-up file; reinstall mlx-lm-tiered")
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        with_file, without = Path(scratch) / "with", Path(scratch) / "without"
        with_file.mkdir()
        without.mkdir()
        shutil.copy(file, with_file)
        environment = os.environ | {"PYTHONPATH": str(_root_of(imported[1]))}
        times: dict[Path, list[float]] = {with_file: [], without: []}
        for number in range(repeats + 1):
            for directory in (with_file, without) if number % 2 else (without, with_file):
                before = time.perf_counter()
                subprocess.run([sys.executable, "-S", "-c", _SCRIPT, str(directory)], env=environment, check=True)
                # The first round fills the page cache and writes byte code.
                if number:
                    times[directory].append(1000 * (time.perf_counter() - before))
    differences = [a - b for a, b in zip(times[with_file], times[without], strict=True)]
    return {
        "bench": "start-up",
        "added_ms": median(differences),
        "with_ms": median(times[with_file]),
        "without_ms": median(times[without]),
        "added_at_best_ms": min(times[with_file]) - min(times[without]),
        "repeats": repeats,
    }


def _root_of(package: str) -> Path:
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PluginError(f"the package {package}, which the start-up file imports, is not installed; reinstall mlx-lm-tiered")
    return Path(spec.submodule_search_locations[0]).parent
