"""A busy server killed with SIGKILL again and again, at random moments, and what each next start finds.

Every round starts a server on the same directory, looks at every file, asks again for
what a flush had reported durable, and then has several clients talk to it: growing
conversations, some given up half way, flushes and drains, a RAM tier small enough to
evict, demotion after moments, a cap on disk that is reached. Then comes the kill: at any
moment, as soon as a file is being written, during the start, or during the stop. Every
answer is compared with that of a server without the plugin.

The cap makes entries go, so what a flush reported durable need not be there for ever. It
must be as long as all that was asked since would fit under half the cap beside it:
entries go by their last use.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from typing import Any

from mlx_lm_tiered.cold import listing
from mlx_lm_tiered.cold.directory import ABANDONED, Directory
from mlx_lm_tiered.progress import Progress

from . import small_model
from .client import RequestFailed
from .server import Server, ServerFailed, server_command, stock, tiered_flags
from .traffic import Reply, Traffic, wrong_answers

CLIENTS = 3
CAP_TOKENS = 16_000  # what the cap has room for
MOMENTS = {"any": 40, "saving": 40, "starting": 10, "stopping": 10}  # of the kill, in percent
PATIENCE = 120.0  # seconds without a byte after which the server counts as stuck
KEPT = 40  # promises remembered
OURS = {"lock", "identities.json", "rates.json"}  # files besides entries that a directory has


def run(model: Path | None, count: int, seed: int = 0) -> dict[str, Any]:
    """Do it; without `model` with one of random weights. ``faults`` says what went wrong. Raises ServerFailed, RequestFailed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-") as scratch:
        place = model or small_model.write(Path(scratch) / "model")
        with stock(place, Path(scratch) / "stock.log", "--prompt-cache-size", "0") as reference:
            killing = _Killing(place, Path(scratch), reference, seed)
            killing.calibrate()
            for number in range(1, count + 1):
                with Progress(f"kill {number} of {count}"):
                    killing.round()
            killing.last_start()
    return {
        "bench": "kills",
        "model": str(model) if model else "random weights",
        "count": count,
        "seed": seed,
        **killing.result(),
        "seconds": time.monotonic() - started,
    }


class _Killing:
    """One directory and its servers, one after another."""

    def __init__(self, model: Path, scratch: Path, reference: Server, seed: int):
        self._model, self._scratch, self._reference = model, scratch, reference
        self._directory, self._log = scratch / "cold", scratch / "server.log"
        self._draw = random.Random(seed)
        self._traffic = Traffic(seed)
        self._counts: Counter[str] = Counter()
        self._faults: list[str] = []
        self._promised: dict[str, Reply] = {}  # by what was asked, the last ones last
        self._compared = 0
        self._first = 0  # reply of this round
        self._last_stats: dict[str, Any] = {}
        self._per_token = self._per_file = self._cap = self._tail = 0

    # Rounds

    def calibrate(self) -> None:
        """Find out what a token and a file take, and how much of a prompt asked again is reused."""
        place = self._scratch / "calibrate"
        traffic = Traffic(0, characters=800)
        with Server(self._model, self._log, tiered_flags(place), command=server_command()) as server:
            for text in ("Hello there. " * 20, "How are you? " * 40):
                first, again = (traffic.ask(server, [{"role": "user", "content": text}]) for _ in range(2))
                self._tail = max(self._tail, first.prompt_tokens - again.cached_tokens)
            if server.flush()[0] != 200:
                raise ServerFailed("what two requests left could not be stored")
        metas = [(found.nbytes, found.meta) for found in listing.entries(place) if found.meta is not None]
        for nbytes, meta in metas:
            tokens = meta.length - meta.start
            self._per_token = max(self._per_token, meta.token_bytes // tokens + 8)
            self._per_file = max(self._per_file, nbytes - meta.token_bytes + 8192)
        if not metas:
            raise ServerFailed("a flush answered that all is on disk, and nothing is")
        self._cap = CAP_TOKENS * self._per_token + 20 * self._per_file

    def round(self) -> None:
        """Start, look, talk, kill."""
        how = self._draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        server = self._start()
        try:
            if how == "starting":
                time.sleep(self._draw.random() * 1.6)
            else:
                self._look(server)
                self._talk(server, how)
        finally:
            self._traffic.ended.set()
            server.kill()
        self._counts["kills"] += 1
        self._counts[f"kills_{how}"] += 1
        self._counts["kills_with_unfinished_files"] += any((self._directory / "tmp").glob("*"))

    def last_start(self) -> None:
        """What the last kill left; then an end in order."""
        with self._start() as server:
            self._look(server)

    def result(self) -> dict[str, Any]:
        names = (
            "kills", "kills_any", "kills_saving", "kills_starting", "kills_stopping", "kills_with_unfinished_files", "starts",
            "flushes", "flushes_durable", "promises_checked", "lost", "answers_compared", "wrong_answers", "ties",
            "restored_answers", "entries_verified", "damaged", "orphans", "over_cap", "evictions", "demotions", "spills", "segments_stored",
        )  # fmt: skip
        return {
            "requests": self._traffic.sent[0],
            "given_up": self._traffic.given_up,
            **{name: self._counts[name] for name in names},
            "failed_requests": len(self._traffic.failures),
            "cap_bytes": self._cap,
            "highest_bytes": self._counts["highest_bytes"],
            "faults": self._faults + self._traffic.failures,
        }

    # One start

    def _start(self) -> Server:
        flags = ["--ssd-cache-max", str(self._cap), "--prompt-cache-bytes", str(self._cap // 6), "--ssd-demote-idle", "0.3"]
        flags += ["--ssd-restore", "always"]  # whether it pays is not the question
        self._counts["starts"] += 1
        return Server(self._model, self._log, tiered_flags(self._directory, *flags), command=server_command(), wait=False)

    def _look(self, server: Server) -> None:
        """Everything that must be so after a start."""
        self._compare()
        server.wait_healthy()
        server.timeout = PATIENCE
        deadline = time.monotonic() + 60
        while (ssd := server.stats()["ssd"])["scanning"] or not ssd["scans"]:
            if time.monotonic() > deadline:
                raise ServerFailed("the directory was not scanned within a minute")
            time.sleep(0.01)
        self._inspect(ssd)
        self._ask_again(server)
        self._compare()

    def _inspect(self, ssd: dict[str, Any]) -> None:
        """Every file of the directory."""
        directory = Directory(self._directory, self._cap)
        with directory.locked():
            files = directory.files()
            usage = directory.usage()
            found = list(listing.listing(directory))
            for entry in found:
                if problem := entry.problem or listing.check(entry.path):
                    self._fault("orphans" if entry.meta else "damaged", f"{entry.path.name}: {problem}")
        self._counts["entries_verified"] += len(found)
        for file in files:
            age = time.time() - file.used / 1e9
            if file.kind == "partial" or (file.kind == "memo" and age > 2 * ABANDONED) or (file.kind == "other" and file.path.name not in OURS):
                self._fault("orphans", f"{file.path.relative_to(self._directory)} was left over")
            elif file.kind == "bad":
                self._fault("damaged", f"{file.path.name} was found damaged")
        if (writers := sum(file.kind == "writer" for file in files)) > 1:
            self._fault("orphans", f"{writers} writers' locks")
        if ssd["corrupt"]:
            self._fault("damaged", f"{ssd['corrupt']} files were damaged at the start")
        self._counts["highest_bytes"] = max(self._counts["highest_bytes"], usage)
        if usage > self._cap:
            self._fault("over_cap", f"{usage} bytes under a cap of {self._cap}")

    def _ask_again(self, server: Server) -> None:
        """What was durable must be reused."""
        for reply in [reply for reply in self._promised.values() if self._must_be_there(reply)]:
            answer = self._traffic.ask(server, list(reply.messages))
            self._counts["promises_checked"] += 1
            if answer.cached_tokens < answer.prompt_tokens - self._tail:
                self._fault("lost", f"{answer.cached_tokens} of {answer.prompt_tokens} tokens of a durable prompt were reused")
            self._promise([self._traffic.replies[-1]])
        tiers = server.stats()["hits_by_tier"]
        self._counts["restored_answers"] += tiers["ssd"]

    def _must_be_there(self, reply: Reply) -> bool:
        requests, characters = (now - then for now, then in zip(self._traffic.sent, reply.sent, strict=True))
        per_request = self._per_file + 64 * self._per_token
        since = characters * self._per_token + requests * per_request
        itself = reply.length * self._per_token + len(reply.messages) * per_request
        return since + itself <= self._cap // 2

    def _promise(self, replies: list[Reply]) -> None:
        for reply in replies:
            asked = repr(reply.messages)
            self._promised.pop(asked, None)
            self._promised[asked] = reply
        for asked in list(self._promised)[:-KEPT]:
            del self._promised[asked]

    def _compare(self) -> None:
        """All answers that were not looked at yet."""
        for what in wrong_answers(self._reference, self._traffic.replies[self._compared :], self._counts):
            self._fault("wrong_answers", what)
        self._compared = len(self._traffic.replies)

    # Until the kill

    def _talk(self, server: Server, how: str) -> None:
        self._traffic.ended.clear()
        self._first, self._last_stats = len(self._traffic.replies), {}
        threads = [threading.Thread(target=self._traffic.run, args=(server, i)) for i in range(CLIENTS)]
        threads.append(threading.Thread(target=self._flush_now_and_then, args=(server, random.Random(self._draw.random()))))
        for thread in threads:
            thread.start()
        try:
            self._await_replies(self._draw.randrange(1, 12), threads)
            time.sleep(self._draw.random() * 0.3)
            if how == "saving":
                self._await_save()
            self._traffic.ended.set()
            if how == "stopping":
                server.process.terminate()
                time.sleep(self._draw.random() * 0.3)
        finally:
            self._traffic.ended.set()
            server.kill()
            for thread in threads:
                thread.join()
        for name in ("evictions", "stored"):
            self._counts[{"stored": "segments_stored"}.get(name, name)] += self._last_stats.get("ssd", {}).get(name, 0)
        for name in ("demotions", "spills"):
            self._counts[name] += self._last_stats.get(name, 0)

    def _await_replies(self, number: int, clients: list[threading.Thread]) -> None:
        """So that on a slow machine as much has happened as on a fast one."""
        deadline = time.monotonic() + 20
        while len(self._traffic.replies) < self._first + number and time.monotonic() < deadline and any(c.is_alive() for c in clients):
            time.sleep(0.005)

    def _await_save(self) -> None:
        """Until a file is being written, and a moment longer."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not any((self._directory / "tmp").glob("*")):
            time.sleep(0.0002)
        time.sleep(self._draw.random() * 0.004)

    def _flush_now_and_then(self, server: Server, draw: random.Random) -> None:
        while not self._traffic.ended.is_set():
            time.sleep(draw.random() * 0.25)
            before = len(self._traffic.replies)
            if draw.random() < 0.8:  # a flush needs a moment without requests, which so many clients seldom leave
                self._traffic.quiet.set()
            path = draw.choice(["/admin/cache/flush", "/admin/cache/flush", "/admin/drain"])
            try:
                status, _ = server.request("POST", path, b"")
                if status == 200:
                    self._promise(self._traffic.replies[max(self._first, before - KEPT) : before])
                self._last_stats = server.stats()
            except (OSError, HTTPException, RequestFailed, ValueError):
                return  # killed, or the clients say why not
            finally:
                self._traffic.quiet.clear()
            self._counts["flushes"] += 1
            self._counts["flushes_durable"] += status == 200

    def _fault(self, kind: str, what: str) -> None:
        self._counts[kind] += 1
        self._faults.append(f"start {self._counts['starts']}: {what}")
