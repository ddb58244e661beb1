"""The code blocks of the documentation, and a reader who does what a page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mlx_lm_tiered import openblas
from support.server import Client

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SERVERS = ("mlx_lm.server ", "mlx_lm.tiered serve ")


class Block(NamedTuple):
    """A fenced code block: where it stands, its language and title, its text."""

    line: int
    language: str
    title: str
    text: str
    section: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    section = ""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    for number, line in lines:
        if line.startswith("#"):
            section = line.lstrip("# ")
        if found := re.fullmatch(r"```(\w*)(?: title=\"(.+)\")?", line):
            text = []
            for _, line in lines:
                if line == "```":
                    break
                text.append(line)
            yield Block(number, found[1], found[2] or "", "\n".join(text) + "\n", section)


class Reader:
    """Does what a page says, block by block: files are saved, commands run, servers started and stopped.

    `home` is the reader's home and `folder` where they are. `instead` has what is written
    in another way here: the port, models' names. `stubs` come first on PATH.
    """

    def __init__(self, home: Path, folder: Path, port: int, instead: Mapping[str, str], stubs: Path | None = None, **env: str):
        self.home, self.folder, self.port = home, folder, port
        self.instead = {"127.0.0.1:8080": f"127.0.0.1:{port}", **instead}
        self.client = Client("127.0.0.1", port)
        self.server: subprocess.Popen[bytes] | None = None
        self.log = home / "server.log"
        self.output = ""
        self._exported = home / ".exported"
        self._exported.touch()
        path = [str(stubs)] if stubs else []
        path += [str(Path(sys.executable).parent), os.environ["PATH"]]
        inherited = {name: value for name, value in openblas.preload_environment(os.environ).items() if not name.startswith("MLX_LM_")}
        # As in conftest.py: tiny models compute as fast as they are restored.
        inherited["MLX_LM_TIERED_SSD_RESTORE"] = "always"
        self.environ = inherited | {"HOME": str(home), "PATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **env}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.stop()
        elif self.server is not None:
            self.server.kill()
            self.server.wait()

    def do(self, block: Block) -> None:
        """What the block is for. Raises AssertionError when it does not do that."""
        text = block.text
        for there, here in self.instead.items():
            text = text.replace(there, here)
        if block.title:
            self.save(block.title, text)
        elif block.language == "text":
            self.compare(text)
        elif block.language == "sh" and text.startswith(SERVERS):
            self.serve(text)
        elif block.language == "sh":
            self.run(text)
        else:
            raise AssertionError(f"line {block.line}: what is a reader to do with this block?")

    def save(self, title: str, text: str) -> None:
        path = self.home / title[2:] if title.startswith("~/") else self.folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, text: str) -> None:
        done = subprocess.run(
            ["bash", "-c", f"set -eo pipefail; . {self._exported}\n{text}\nexport -p > {self._exported}"],
            cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        self.output = done.stdout
        assert done.returncode == 0, f"{text}exited {done.returncode}\n{done.stdout}{done.stderr}"

    def serve(self, text: str) -> None:
        """Start a server and wait for it. The one that runs gets a Ctrl-C first."""
        self.stop()
        command = re.sub(r"^(mlx_lm\.server|\S*mlx_lm\.tiered serve) ", rf"exec \1 --port {self.port} ", text)
        with open(self.log, "ab") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f". {self._exported}\n{command}"],
                cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.server.poll() is None:
            with suppress(OSError):
                if self.client.healthy():
                    return
            time.sleep(0.05)
        raise AssertionError(f"{text}does not serve\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Ctrl-C, and the end of the server."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(60) == 0, self.log.read_text()[-3000:]
            self.server = None

    def compare(self, text: str) -> None:
        """The last output has these lines, but for numbers. Calls the outputs of several blocks in a row one."""
        expected, there = _plain(text), _plain(self.output)
        assert expected == there, f"{self.output}\nis not\n{text}"


def _plain(text: str) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "0", " ".join(line.split())) for line in text.strip().splitlines()]
