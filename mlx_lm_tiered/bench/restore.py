"""A restore against a raw read of the same bytes, warm and cold, whole and in segments; no server, no model.

An entry of an 8B model's shape is written whole, and once more as a chain of
segments. Then the same files are read in turn, raw and by the tier's own restore,
and the ratio is the median over the pairs of raw time to restore time. A restore
begins with the store's question for the entry and ends with caches in hand, its
checksums compared.

Raw is one thread that opens the files in the chain's order and reads each with
``preadv``, in pieces of the same size as the tier's, into memory that is new each
time and begins at a page, as a restore's memory is new each time: the page faults of
that memory count for both. ``threads_ratio`` is the same against as many threads as
the tier reads with, a file's range each. Before every read, what the process held is
given back to the system. Cold: the files leave the page cache before each read, by
``posix_fadvise``, where the system has it (elsewhere: run ``purge`` before, and
nothing is called cold).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold.arrays import to_bytes
from mlx_lm_tiered.cold.files import PIECE
from mlx_lm_tiered.cold.jobs import Job, describe
from mlx_lm_tiered.cold.parallel import THREADS, run_all
from mlx_lm_tiered.cold.reader import read_into
from mlx_lm_tiered.cold.store import ColdEntry, ColdStore
from mlx_lm_tiered.identity import Identity
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.progress import Progress

from .restart import drop_page_cache

FINGERPRINTS = {"whole": "0" * 31 + "1", "chain": "0" * 31 + "2"}


def run(
    tokens: int = 6000, layers: int = 32, heads: int = 8, head_dim: int = 128, segments: int = 8, repeats: int = 12, directory: Path | None = None
) -> dict[str, Any]:
    """Measure it. `directory` (default: a new temporary one) says on which disk. Times are seconds, speeds bytes a second. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="mlx-lm-tiered-bench-", dir=directory) as scratch:
        root = Path(scratch) / "cold"
        with Progress("writing"):
            _write(root, tokens, layers, heads, head_dim, segments)
        stores = {mode: _attached(root, mode) for mode in ("always", "never")}
        result: dict[str, Any] = {"bench": "restore", "tokens": tokens, "repeats": repeats, "threads": THREADS, "piece_bytes": PIECE}
        for kind in FINGERPRINTS:
            prefix = "" if kind == "whole" else "chain_"
            chain = _find(stores["always"], kind, tokens).chain
            result[f"{prefix}bytes"] = sum(one.nbytes for one in chain)
            result[f"{prefix}files"] = len(chain)
            reads: dict[str, Callable[[], Any]] = {
                "raw": partial(_raw, [one.path for one in chain], 1),
                "raw_threads": partial(_raw, [one.path for one in chain], THREADS),
                "restore": partial(_restore, stores["always"], kind, tokens),
                "unchecked": partial(_restore, stores["never"], kind, tokens),
            }
            for temperature in ("warm", "cold"):
                with Progress(f"{kind}, {temperature}"):
                    times = _alternate(reads, repeats, root if temperature == "cold" else None)
                if not times:
                    continue
                result |= _report(times, prefix, temperature, result[f"{prefix}bytes"])
        for store in stores.values():
            store.close()
    result["page_cache_dropped"] = "ratio_to_raw_read_cold" in result
    return result


def _report(times: dict[str, list[float]], prefix: str, temperature: str, size: int) -> dict[str, Any]:
    def ratio(of: str, to: str) -> float:
        return median(a / b for a, b in zip(times[of], times[to], strict=True))

    return {
        f"{prefix}ratio_to_raw_read_{temperature}": ratio("raw", "restore"),
        f"{prefix}threads_ratio_{temperature}": ratio("raw_threads", "restore"),
        f"{prefix}checksum_cost_{temperature}": ratio("restore", "unchecked") - 1,
        f"{prefix}raw_read_{temperature}_bytes_s": size / median(times["raw"]),
        f"{prefix}restore_{temperature}_bytes_s": size / median(times["restore"]),
        f"{prefix}all_{temperature}_s": times,
    }


def _alternate(reads: dict[str, Callable[[], Any]], repeats: int, cold: Path | None) -> dict[str, list[float]]:
    """Each read's seconds, in turns to and fro, so that those compared stand close to each other and each as often first; empty when the page cache cannot be dropped."""
    names = list(reads)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, repeats):
        for name in names if number % 2 else names[::-1]:
            if cold is not None and not drop_page_cache(cold):
                return {}
            _give_back_memory()
            started = time.perf_counter()
            read = reads[name]()
            seconds = time.perf_counter() - started
            del read
            if number >= 0:  # the first round fills the page cache and what mlx makes at first use
                times[name].append(seconds)
    return times


def _raw(paths: list[Path], threads: int) -> list[np.ndarray]:
    kept = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            memory = np.empty(size + mmap.PAGESIZE, np.uint8)
            start = -memory.ctypes.data % mmap.PAGESIZE
            view = memoryview(memory)[start : start + size]
            share = -(-size // threads // PIECE) * PIECE
            ranges = [(at, min(size, at + share)) for at in range(0, size, share)]
            run_all([partial(_read_range, fd, view, *span) for span in ranges], alone=threads == 1)
        finally:
            os.close(fd)
        kept.append(memory)
    return kept


def _read_range(fd: int, view: memoryview, start: int, end: int) -> None:
    for at in range(start, end, PIECE):
        read_into(fd, [view[at : min(at + PIECE, end)]], at)


def _restore(store: ColdStore, kind: str, tokens: int) -> list[Any]:
    caches = store.restore(_find(store, kind, tokens))
    if caches is None:
        raise OSError("an entry could not be restored")
    return caches


def _find(store: ColdStore, kind: str, tokens: int) -> ColdEntry:
    found = store.find(FINGERPRINTS[kind], "", _key(tokens), tokens)
    if found is None or found.length != tokens:
        raise OSError("an entry could not be found")
    return found.entry


def _key(tokens: int) -> bytes:
    return token_key(range(tokens))


def _attached(root: Path, verify: str) -> ColdStore:
    store = ColdStore(root, 1 << 60, verify)
    for fingerprint in FINGERPRINTS.values():
        store.attach(fingerprint)
    store.wait_scanned()
    return store


def _write(root: Path, tokens: int, layers: int, heads: int, head_dim: int, segments: int) -> None:
    """The same entry twice: whole, and as a chain."""
    values = mx.random.normal((1, heads, tokens, head_dim)).astype(mx.bfloat16)
    mx.eval(values)
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        cache.keys = cache.values = values
        cache.offset = tokens
    store = ColdStore(root, 1 << 60)
    try:
        _save(store, "whole", tokens, caches)
        for number in range(1, segments + 1):
            _save(store, "chain", tokens * number // segments, caches)
    finally:
        store.close()


def _save(store: ColdStore, kind: str, tokens: int, caches: list[Any]) -> None:
    part = kinds.lend(caches, tokens) if tokens < (kinds.length(caches) or 0) else caches
    job = Job(Identity(FINGERPRINTS[kind], {}), "", _key(tokens), part)
    meta, tensors = describe(job)
    writer = store.begin(*job.place, meta)
    try:
        for name, array in tensors.items():
            assert isinstance(array, mx.array)  # nothing is left for later in plain caches
            writer.write(name, to_bytes(array))
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _give_back_memory() -> None:
    """What was freed goes to the system, so that the next read pays for its memory."""
    gc.collect()
    mx.clear_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # not glibc: its allocator does not keep large pieces
        return
