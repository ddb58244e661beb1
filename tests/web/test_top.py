"""`mlx_lm.tiered top`, against what a server shows: plain, on a terminal, and when there is no server."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from idle_engine import Engine
from mlx_lm_hooks import ModelSource, Request, Served

from mlx_lm_tiered.cli import main
from mlx_lm_tiered.commands.top import lines
from mlx_lm_tiered.prefix.lookup import Lookup
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.served import NOTE
from mlx_lm_tiered.serving.page.page import Page
from mlx_lm_tiered.settings import Settings

EVIL = "\x1b[2Jgone\r\n"


@pytest.fixture
def runtime() -> Runtime:
    """One that has served a request and serves another."""
    runtime = Runtime(Settings())
    runtime.engine = Engine()
    runtime.source = ModelSource(Path("/models/some-model"))
    runtime.requests.ended(Served(1.0, 1.5, 2.0, 3.0, 4.0, 1234, 800, 0, 0, 11, "stop", {NOTE: Lookup(1234, 800, "ram", why="the closest one" + EVIL)}))
    runtime.statistics.looked_up("ram", 1234, 800, 2.5)
    runtime.requests.began(Served(time.monotonic() - 1, started=1.0, prompt_tokens=400, processed=100, to_process=400))
    return runtime


@pytest.fixture
def url(runtime):
    """The page's own answers, over HTTP."""
    page = Page(runtime)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = page.state(Request("GET", self.path, {}, {}, b"", True))
            self.send_response(reply.status)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_elsewhere_it_is_plain_and_once(url, capsys):
    assert main(["top", "--server", url]) == 0
    out = capsys.readouterr().out
    assert "some-model" in out and "running 1" in out and "1,234" in out and "64.8 %" in out and "2.5 s" in out
    assert "[####............] 100 of 400" in out and "the closest one" in out
    assert "\x1b" not in out and "\r" not in out


def test_on_a_terminal_it_is_drawn_anew_and_leaves_no_trace(url, runtime):
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "mlx_lm_tiered.cli", "top", "--server", url, "--every", "0.2"]
    process = subprocess.Popen(command, stdout=secondary, stdin=secondary, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "100", "LINES": "40"})
    os.close(secondary)
    seen = b""

    def until(wanted: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 20
        while wanted not in seen:
            assert time.monotonic() < end, seen
            if select.select([primary], [], [], 0.2)[0]:
                try:
                    seen += os.read(primary, 65536)
                except OSError:  # Linux's way of saying that nobody writes any more
                    return

    until(b"100 of 400")
    runtime.requests.running()[0].processed = 200
    until(b"200 of 400")
    process.send_signal(signal.SIGINT)
    until(b"\x1b[?1049l")
    assert process.wait(10) == 0
    os.close(primary)
    text = seen.decode()
    assert text.startswith("\x1b[?1049h") and "\x1b[2J" not in text
    assert max(len(line) for line in text.replace("\x1b[?1049h\x1b[?25l", "").split("\r\n")) < 100 + 20  # what tells the terminal takes some


def test_without_a_server_it_says_so(capsys):
    assert main(["top", "--server", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["top", "--server", "ftp://x"]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["top", "--every", "0"])
    assert ended.value.code == 2


def test_all_that_a_server_may_have_is_shown():
    state = json.loads((Path(__file__).parent / "state.json").read_text())
    text = "\n".join(line for _, line in lines(state))
    for wanted in ("Restores", "Entries on disk (2)", "spill queue 3", "pool 5 of 10 blocks", "drafts from ngram: 50.0 % accepted, by place 60.0 %  40.0 %", "faults: take 1"):
        assert wanted in text
