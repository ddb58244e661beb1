"""The index over many entries: finding one, reading all headers at start, and whether a server's readiness waits for that.

The directory is filled with sound entries of a model: headers of an 8B model's size,
real tokens with their checksum, bodies that are holes in the file. Tokens are as
agents have them: a few long system prompts, each followed by conversations that
differ from their first token on. A process of its own reads them all (`scan_files_per_s`:
from nothing to all found, the page cache warm; `scan_cold_files_per_s`: dropped before,
where the system can), says what memory that took (`rss_mb`: of the process, `index_mb`:
more than before the scan), and asks for prefixes: of entries that go on, of entries
that diverge somewhere, and of what shares a system prompt only.

Readiness is the time from a server's start to the first 200 of ``/health``, over an
empty directory and over the full one in turns.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.family import entry_name
from mlx_lm_tiered.cold.meta import Meta, TensorSpec
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.progress import Progress

from .restart import drop_page_cache
from .server import Server, ServerFailed, server_command, tiered_flags
from .writes import flush

LAYERS = 32
VOCABULARY = 128_000
PROMPTS = 20  # system prompts, of a quarter to a half of an entry's tokens
FINDS = 1500
ROOM = ["--ssd-cache-max", "1TB"]


def run(model: Path, entries: int = 10_000, tokens: int = 16_000, repeats: int = 5, directory: Path | None = None) -> dict[str, Any]:
    """Measure it. `directory` says on which disk; `entries` of 16,000 tokens take 150 kB each there. Raises ServerFailed, OSError."""
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-", dir=directory) as scratch:
        full, empty, log = Path(scratch) / "full", Path(scratch) / "empty", Path(scratch) / "server.log"
        with Server(model, log, tiered_flags(full, *ROOM), command=server_command()) as server:
            server.complete("Hello", max_tokens=2)
            flush(server)
        [folder] = (full / "v1").iterdir()
        with Progress("writing entries", amount=lambda done, total: f"{done:,}/{total - 1:,} entries") as progress:
            _fill(folder, entries, tokens, progress)
        with Progress("reading them"):
            warm = [_child(full, folder.name, entries, tokens) for _ in range(2)][-1]
        cold = _child(full, folder.name, entries, tokens)["scan_files_per_s"] if drop_page_cache(full) else None
        ready: dict[str, list[float]] = {"empty": [], "full": []}
        for number in range(repeats):
            for name in ("empty", "full") if number % 2 else ("full", "empty"):
                with Progress(f"starting a server, {name}, {number + 1} of {repeats}"):
                    server = Server(model, log, tiered_flags(full if name == "full" else empty, *ROOM), command=server_command(), wait=False)
                    try:
                        ready[name].append(server.wait_healthy())
                        count = server.stats()["ssd"]["entries"]
                    finally:
                        server.kill()
        if warm["indexed"] != entries + 1:
            raise ServerFailed(f"{warm['indexed']} of {entries + 1} entries were found")
    return {
        "bench": "index",
        "model": str(model),
        "entries": entries,
        "tokens": tokens,
        **warm,
        "scan_cold_files_per_s": cold,
        "ready_empty_s": median(ready["empty"]),
        "ready_full_s": median(ready["full"]),
        "ready_added_s": median(b - a for a, b in zip(ready["empty"], ready["full"], strict=True)),
        "indexed_when_last_ready": count,
        "repeats": repeats,
        "ready_all_s": ready,
    }


def tokens_of(number: int, count: int) -> np.ndarray:
    """The tokens of entry `number`: one of the system prompts, then what only this one has."""
    place = number % PROMPTS
    shared = count // 4 + place * count // (4 * PROMPTS)
    prompt = np.random.default_rng(place).integers(0, VOCABULARY, shared)
    return np.concatenate([prompt, np.random.default_rng(10**6 + number).integers(0, VOCABULARY, count - shared)])


def _fill(folder: Path, entries: int, tokens: int, progress: Progress) -> None:
    specs = tuple(TensorSpec(f"{layer}.{name}", "U8", (1, 1, tokens, 1), 2) for layer in range(LAYERS) for name in ("keys", "values"))
    descriptors = [{"class": "KVCache", "offset": tokens}] * LAYERS
    meta = Meta(folder.name, "", tokens, specs, descriptors, ("kv:plain",) * LAYERS, True, 1, "assistant", {}, time.time_ns())
    layout, size = fmt.layout(meta), fmt.file_size(meta)
    hole = fmt.digest(bytes(tokens))
    for number in range(entries):
        found = tokens_of(number, tokens)
        raw = found.astype("<i8").tobytes()
        head = bytearray(layout)
        fmt.seal(head, [fmt.digest(raw), *[hole] * len(specs)])
        fd = os.open(folder / entry_name("", token_key(found)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.writev(fd, [head, raw])
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        progress(number + 1, entries + 1)


def _child(root: Path, fingerprint: str, entries: int, tokens: int) -> dict[str, Any]:
    argv = [sys.executable, "-m", "mlx_lm_tiered.bench.index", str(root), fingerprint, str(entries), str(tokens)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise ServerFailed(f"reading the entries failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def measure(root: Path, fingerprint: str, entries: int, tokens: int) -> dict[str, Any]:
    """Read all entries, then look for some. In this process, which should do nothing else."""
    store = ColdStore(root, 1 << 60)
    store.wait_scanned()  # the housekeeping at a start
    before = _resident()
    started = time.perf_counter()
    store.attach(fingerprint)
    store.wait_scanned()
    scanned = time.perf_counter() - started
    indexed = store.stats()["entries"]
    after = _resident()
    source = random.Random(1)
    times: list[float] = []
    for number in range(FINDS):
        known = tokens_of(source.randrange(entries), tokens)
        more = np.random.default_rng(10**7 + number).integers(0, VOCABULARY, tokens // 8)
        cut = (tokens, source.randrange(1, tokens), tokens // 4)[number % 3]
        key = token_key(np.concatenate([known[:cut], more]))
        began = time.perf_counter()
        found = store.find(fingerprint, "", key, len(key) // 8 - 1)
        times.append(time.perf_counter() - began)
        if found is None or found.length < cut:
            raise SystemExit(f"{found and found.length} of {cut} tokens were found")
    store.close()
    times.sort()
    return {
        "find_ms_p50": 1000 * times[len(times) // 2],
        "find_ms_p99": 1000 * times[len(times) * 99 // 100],
        "scan_files_per_s": indexed / scanned,
        "scan_s": scanned,
        "indexed": indexed,
        "rss_mb": after / 1e6,
        "index_mb": (after - before) / 1e6,
    }


def _resident() -> float:
    """Bytes of memory this process has, now where the system tells that, else at its highest."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
