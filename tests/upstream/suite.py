"""Upstream's own tests of the installed version: fetched, prepared, run.

They are in upstream's sdist, not in its wheel, and are not ours to keep: the sdist
goes to the user's cache directory. The hub model that they load is replaced by the
small real one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm_tiered import openblas
from mlx_lm_tiered.demo.model import cache_root

# Two halves that take about as long.
HALVES = (("test_generate.py",), ("test_server.py", "test_prompt_cache.py"))
FILES = tuple(file for half in HALVES for file in half)
HUB_MODEL = re.compile(r'"mlx-community/Qwen1\.5-0\.5B-Chat-4bit"')
TIMEOUT = 600.0
# What the plugin counted, into the file that the run's environment names.
CONFTEST = """
import json, os

import mlx_lm_tiered

def pytest_unconfigure(config):
    with open(os.environ["RUN_STATISTICS"], "w") as file:
        json.dump(mlx_lm_tiered.stats(), file)
"""


def fetch() -> Path:
    """The sdist of the installed mlx-lm."""
    installed = version("mlx-lm")
    directory = cache_root() / "upstream"
    directory.mkdir(parents=True, exist_ok=True)
    sdist = directory / f"mlx_lm-{installed}.tar.gz"
    if not sdist.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--dest", str(directory)]
        subprocess.run([*command, f"mlx-lm=={installed}"], check=True)
    return sdist


def prepare(directory: Path, model: Path) -> None:
    """Write the test files into `directory`, which becomes a place to run pytest in."""
    with tarfile.open(fetch()) as archive:
        root = archive.getnames()[0].split("/")[0]
        for name in FILES:
            member = archive.extractfile(f"{root}/tests/{name}")
            assert member is not None
            text, count = HUB_MODEL.subn(repr(str(model)), member.read().decode())
            assert count, f"{name} of mlx-lm {version('mlx-lm')} loads another model than before"
            (directory / name).write_text(text)
    (directory / "conftest.py").write_text(CONFTEST)


@dataclass
class Run:
    """One run of the tests in a process of its own."""

    process: subprocess.Popen[bytes]
    home: Path

    @classmethod
    def start(cls, tests: Path, selected: Sequence[str], home: Path, environment: Mapping[str, str]) -> Run:
        """Start the `selected` files or tests of `tests`.

        `home`, which is made, is for the run's own files; `environment` is laid over
        this process's, without any plugin settings of ours. One thread computes: runs
        side by side then do not fight over the cores.
        """
        hub = home / "huggingface"
        (hub / "hub").mkdir(parents=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLX_LM_")}
        env = openblas.preload_environment(clean) | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
        env["RUN_STATISTICS"] = str(home / "statistics.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={home / 'results.xml'}"]
        command += ["--rootdir", str(tests), *selected]
        with open(home / "log", "wb") as out:
            process = subprocess.Popen(command, cwd=tests, env={**env, **environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        return cls(process, home)

    def log(self) -> str:
        return (self.home / "log").read_text()[-6000:]

    def statistics(self) -> Any:
        """What the plugin counted; None where it was off."""
        return json.loads((self.home / "statistics.json").read_text())

    def outcomes(self) -> dict[str, str]:
        """``passed``, ``failed`` or ``skipped`` by test (as pytest selects it), once the run has ended."""
        try:
            self.process.wait(TIMEOUT)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        results = self.home / "results.xml"
        assert results.exists(), self.log()
        found = {}
        for case in ElementTree.parse(results).iter("testcase"):
            tags = {child.tag for child in case}
            module, _, group = (case.get("classname") or "").partition(".")
            name = "::".join(part for part in (f"{module}.py", group, case.get("name") or "") if part)
            found[name] = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        return found
