"""Two ranks of one server, restarted and killed again and again, beside two ranks of mlx-lm alone.

Every round starts both ranks on the same directory, asks again for a prompt that an
earlier round computed, has clients with growing conversations talk to them, and ends
them: by SIGTERM to a rank or to the launcher, or by SIGKILL of one rank, mostly as a
file is being written. Every answer is compared with that of two ranks without the
plugin, every file is looked at before every start.
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import Any

from mlx_lm_tiered.cold import listing
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.progress import Progress

from . import small_model
from .client import RequestFailed
from .ranked_server import RankedServer, plain
from .report import spread
from .server import ServerFailed, tiered_flags
from .text import document
from .traffic import Traffic, wrong_answers

CLIENTS = 2
KILLS = 0.4  # of the ends
PATIENCE = 60.0  # seconds without a byte, or until all ranks have ended, after which they count as stuck
CAP = 1 << 30


def run(model: Path | None, rounds: int, seed: int, sharding: str, prefix_characters: int) -> dict[str, Any]:
    """Do it; without `model` with one of random weights. ``faults`` says what went wrong. Raises ServerFailed, RequestFailed."""
    started = time.monotonic()
    flags = ["--pipeline"] if sharding == "pipeline" else []
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        place = model or small_model.write(Path(scratch) / "model", pipelines=True)
        with plain(place, Path(scratch) / "plain.log", *flags, "--prompt-cache-size", "0") as reference:
            ranking = _Ranking(place, Path(scratch), reference, flags, seed, prefix_characters)
            for number in range(1, rounds + 1):
                with Progress(f"round {number} of {rounds}"):
                    ranking.round(last=number == rounds)
    return {
        "bench": "ranks",
        "model": str(model) if model else "random weights",
        "ranks": 2,
        "sharding": sharding,
        "rounds": rounds,
        "seed": seed,
        **ranking.result(),
        "seconds": time.monotonic() - started,
    }


class _Ranking:
    """One directory and its servers, one after another."""

    def __init__(self, model: Path, scratch: Path, reference: RankedServer, flags: list[str], seed: int, characters: int):
        self._model, self._scratch, self._reference, self._flags = model, scratch, reference, flags
        self._directory, self._log = scratch / "cold", scratch / "server.log"
        self._draw = random.Random(seed)
        self._traffic = Traffic(seed, systems=2)
        self._characters = characters
        self._counts: Counter[str] = Counter()
        self._faults: list[str] = []
        self._compared = 0
        self._ratios: list[float] = []
        self._ends: list[float] = []  # seconds, of the stops and of the kills
        self._durable: tuple[str, float, list[int]] | None = None  # a prompt, the seconds that it took to compute, and the answer

    def round(self, last: bool) -> None:
        """Look, start, talk, end."""
        self._inspect()
        with RankedServer(self._model, self._log, tiered_flags(self._directory, "--ssd-cache-max", str(CAP), *self._flags)) as server:
            server.timeout = PATIENCE
            self._counts["starts"] += 1
            try:
                self._ask_again(server)
                self._compute(server)
                if not last and self._draw.random() < KILLS:
                    self._kill(server)
                else:
                    self._stop(server)
            except TimeoutError:
                self._fault("hangs", f"no answer in {PATIENCE:g} s")
            except ServerFailed as error:
                self._fault("hangs", str(error)[-1500:])  # what the ranks said last
            finally:
                self._traffic.ended.set()
                server.kill()
        self._compare()

    def result(self) -> dict[str, Any]:
        names = ("starts", "stops", "kills", "kills_with_unfinished_files", "hangs", "answers_compared", "wrong_answers", "ties", "reused_on_all", "short", "damaged", "lost_requests")
        return {
            "conversations": self._traffic.conversations,
            "requests": self._traffic.sent[0],
            **{name: self._counts[name] for name in names},
            "slowest_end_seconds": max(self._ends, default=0.0),
            **(spread("warm_over_cold", self._ratios) if self._ratios else {}),
            "faults": self._faults,
        }

    def _ask_again(self, server: RankedServer) -> None:
        """What was durable on all ranks is reused by all."""
        if self._durable is None:
            return
        prompt, seconds, tokens = self._durable
        answer = server.complete(prompt, tokens=True, max_tokens=16)
        self._ratios.append(answer.ttft / seconds)
        if answer.tokens != tokens:
            self._fault("wrong_answers", "a restored prompt has another answer")
        reports = server.stats()["ranks"]["reports"]
        reused = min((report["tokens_saved"] for report in reports), default=0)
        if reused < answer.prompt_tokens - 1 or len(reports) != 2:
            self._fault("short", f"{reused} of {answer.prompt_tokens} durable tokens were reused")
        self._counts["reused_on_all"] += 1

    def _compute(self, server: RankedServer) -> None:
        """A prompt that was never asked before, until it is durable."""
        start = self._draw.randrange(100_000)
        prompt = f"{self._counts['starts']} {document(start + self._characters)[start:]}"
        answer = server.complete(prompt, tokens=True, max_tokens=16)
        status, _ = server.flush()
        self._durable = (prompt, answer.ttft, answer.tokens) if status == 200 else None

    def _talk(self, server: RankedServer, replies: int) -> list[threading.Thread]:
        self._traffic.ended.clear()
        until = len(self._traffic.replies) + replies
        threads = [threading.Thread(target=self._traffic.run, args=(server, who)) for who in range(CLIENTS)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE
        while len(self._traffic.replies) < until and time.monotonic() < deadline and any(thread.is_alive() for thread in threads):
            time.sleep(0.005)
        return threads

    def _stop(self, server: RankedServer) -> None:
        threads = self._talk(server, self._draw.randrange(2, 10))
        self._traffic.ended.set()
        rank = self._draw.choice([0, 1, None])
        server.signal(signal.SIGTERM, rank)
        self._ends.append(server.wait_ended(PATIENCE))
        self._counts["stops"] += 1
        for thread in threads:
            thread.join()

    def _kill(self, server: RankedServer) -> None:
        threads = self._talk(server, self._draw.randrange(1, 8))
        flusher = threading.Thread(target=self._flush, args=(server,))
        flusher.start()
        deadline = time.monotonic() + 2.0 * self._draw.random()
        while time.monotonic() < deadline and not any((self._directory / "tmp").glob("*")):
            time.sleep(0.0002)
        time.sleep(self._draw.random() * 0.004)
        self._counts["kills_with_unfinished_files"] += any((self._directory / "tmp").glob("*"))
        self._traffic.ended.set()
        server.signal(signal.SIGKILL, self._draw.choice([0, 1]))
        self._ends.append(server.wait_ended(PATIENCE))
        self._counts["kills"] += 1
        for thread in [*threads, flusher]:
            thread.join()

    def _flush(self, server: RankedServer) -> None:
        try:
            server.request("POST", "/admin/cache/flush", b"")
        except (OSError, HTTPException, RequestFailed):
            return  # killed

    def _inspect(self) -> None:
        """Every file that the last end left."""
        if not self._directory.exists():
            return
        directory = Directory(self._directory, CAP)
        with directory.locked():
            for entry in listing.listing(directory):
                if problem := entry.problem or listing.check(entry.path):
                    self._fault("damaged", f"{entry.path.name}: {problem}")

    def _compare(self) -> None:
        """All answers that were not looked at yet."""
        for what in wrong_answers(self._reference, self._traffic.replies[self._compared :], self._counts):
            self._fault("wrong_answers", what)
        self._compared = len(self._traffic.replies)
        for failure in self._traffic.failures:
            self._fault("lost_requests", failure)
        self._traffic.failures.clear()

    def _fault(self, kind: str, what: str) -> None:
        self._counts[kind] += 1
        self._faults.append(f"start {self._counts['starts']}: {what}")
