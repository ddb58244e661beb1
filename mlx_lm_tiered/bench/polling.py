"""Decode speed while the status page is open and the metrics are scraped, both every second, over that while nobody looks.

One real server decodes one long answer. Its time is cut into pieces, in turn with and
without somebody who looks; the order in a pair of neighbours alternates, so that what
changes with the length of the answer cancels out. ``decode_ratio`` is the median over the
pairs' ratios. Before that the lists of the page are filled with requests and entries.

``looking_cpu_share`` is the same cost seen from the other side: processor seconds a second,
of one core, that a server which does nothing else takes for those who look. It is
finer than what can be told from the speed of decoding.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered.bench.text import long_document
from mlx_lm_tiered.progress import Progress

from .client import RequestFailed, endless
from .report import spread
from .server import Server, server_command, tiered_flags

REQUESTS = 25  # as many as the page shows
PREFIX_TOKENS = 120
LEAST = 3  # tokens in a piece


def run(model: Path, seconds: float = 5.0, pairs: int = 12, every: float = 1.0) -> dict[str, Any]:
    """Measure it: `pairs` of pieces of so many seconds. Raises ServerFailed, RequestFailed."""
    text, bias = long_document(model, PREFIX_TOKENS), endless(model)
    measured = []
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        home = Path(scratch)
        with Server(model, home / "log", tiered_flags(home / "cold"), command=server_command()) as server:
            for number in range(REQUESTS):
                with Progress(f"request {number + 1} of {REQUESTS}"):
                    server.complete(f"{number}. {text}", max_tokens=4)
            server.flush()
            with Progress("at rest"):
                share, kilobytes = _at_rest(server, seconds * 2, every)
            with _Stream(server, bias) as stream:
                for number in range(pairs):
                    with Progress(f"pair {number + 1} of {pairs}"):
                        measured.append(_pair(server, stream, number, seconds, every))
    return {
        "bench": "polling",
        "model": str(model),
        **spread("decode_ratio", [pair["looking"] / pair["alone"] for pair in measured]),
        "looking_tokens_per_s": median(pair["looking"] for pair in measured),
        "alone_tokens_per_s": median(pair["alone"] for pair in measured),
        "looking_cpu_share": share,
        "kilobytes_per_look": kilobytes,
        "seconds": seconds,
        "every_s": every,
        "pairs": pairs,
        "measured": measured,
    }


def _pair(server: Server, stream: _Stream, number: int, seconds: float, every: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for side in ("looking", "alone") if number % 2 == 0 else ("alone", "looking"):
        if side == "looking":
            with _Looking(server, every) as looking:
                found[side] = stream.speed(seconds)
            if looking.looks == 0:
                raise RequestFailed("the metrics could not be read")
        else:
            found[side] = stream.speed(seconds)
    return found


def _at_rest(server: Server, seconds: float, every: float) -> tuple[float | None, float]:
    """Processor seconds a second that looking takes, None where the system does not tell; kilobytes of a look."""
    time.sleep(2.0)
    alone = _processor_seconds(server, lambda: time.sleep(seconds))
    with _Looking(server, every) as looking:
        time.sleep(every)
        busy = _processor_seconds(server, lambda: time.sleep(seconds))
    share = None if alone is None or busy is None else max(0.0, (busy - alone) / seconds)
    return share, looking.bytes / max(1, looking.looks) / 1000


def _processor_seconds(server: Server, meanwhile: Callable[[], None]) -> float | None:
    def used() -> float | None:
        try:
            fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = used()
    meanwhile()
    after = used()
    return None if before is None or after is None else after - before


class _Stream:
    """One answer that does not end, and when its pieces came."""

    def __init__(self, server: Server, bias: dict[str, float]):
        self._connection = HTTPConnection(server.host, server.port, timeout=600)
        self._body = {"prompt": "Tell a story.", "max_tokens": 1_000_000, "stream": True, "logit_bias": bias}
        self._arrivals: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True, name="stream")

    def __enter__(self) -> _Stream:
        self._connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        self._thread.start()
        self.speed(1.0)
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._connection.sock.close() if self._connection.sock is not None else None
        self._response.close()

    def speed(self, seconds: float) -> float:
        """Tokens a second in the seconds to come."""
        begun = len(self._arrivals)
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self._arrivals) - begun < LEAST:
            if not self._thread.is_alive():
                raise RequestFailed("the answer ended")
            time.sleep(0.01)
        times = self._arrivals[begun:]
        return (len(times) - 1) / (times[-1] - times[0])

    def _read(self) -> None:
        with suppress(OSError, ValueError, AttributeError):  # it is closed in the middle
            for line in self._response:
                if line.startswith(b"data:"):
                    self._arrivals.append(time.monotonic())


class _Looking:
    """Somebody who has the page open, and a Prometheus."""

    def __init__(self, server: Server, every: float):
        self._server = server
        self._every = every
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._scrape, self._watch)]
        self.looks = 0
        self.bytes = 0

    def __enter__(self) -> _Looking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _scrape(self) -> None:
        while not self._ended.wait(self._every):
            status, body = self._server.request("GET", "/metrics")
            if status != 200:
                return
            self.looks += 1
            self.bytes += len(body)

    def _watch(self) -> None:
        connection = HTTPConnection(self._server.host, self._server.port, timeout=30)
        try:
            connection.request("GET", "/tiered")
            self.bytes += len(connection.getresponse().read())
            connection.request("GET", "/tiered/events")
            for line in connection.getresponse():
                self.bytes += len(line)
                if self._ended.is_set():
                    return
        finally:
            connection.close()
