"""Upstream's own tests of the installed version: fetched, prepared, run.

They are in upstream's sdist, not in its wheel, and are not ours to keep: the sdist
goes to the user's cache directory. The hub model that they load is replaced by the
small real one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mlx_lm_tiered import openblas
from mlx_lm_tiered.demo.model import cache_root

FILES = ("test_prompt_cache.py", "test_server.py", "test_generate.py")
HUB_MODEL = re.compile(r'"mlx-community/Qwen1\.5-0\.5B-Chat-4bit"')
TIMEOUT = 600.0


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


@dataclass
class Run:
    """One run of the tests in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    xml: Path

    @classmethod
    def start(cls, tests: Path, home: Path, environment: Mapping[str, str]) -> Run:
        """Start it; `home` is for its own files, `environment` is laid over this process's, without any plugin settings of ours."""
        hub = home / "huggingface"
        (hub / "hub").mkdir(parents=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLX_LM_")}
        env = openblas.preload_environment(clean) | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", **environment}
        log, xml = home / "log", home / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={xml}", "--rootdir", str(tests), str(tests)]
        with open(log, "wb") as out:
            return cls(subprocess.Popen(command, cwd=tests, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out), log, xml)

    def outcomes(self) -> dict[str, str]:
        """``passed``, ``failed`` or ``skipped`` by test, once it has ended."""
        try:
            self.process.wait(TIMEOUT)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        assert self.xml.exists(), self.log.read_text()[-3000:]
        found = {}
        for case in ElementTree.parse(self.xml).iter("testcase"):
            tags = {child.tag for child in case}
            name = f"{case.get('classname')}::{case.get('name')}"
            found[name] = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        return found
