"""What prefilling and restoring cost, measured while serving, for each model by its fingerprint.

A prefill chunk of n tokens behind `offset` others is taken to cost
``c + a*n + b*n*(offset + n/2)`` seconds: a call, the weights' work, and attention,
which looks at all tokens before. A restore of `size` bytes costs ``c + a*size``.
Recent measurements count more; see `fit` for how outliers do not.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .fit import fit
from .rates_file import read, write

KEPT_CHUNKS = 32
KEPT_RESTORES = 8
SMALLEST_CHUNK = 16  # tokens; below, the call is all that is measured
LEAST_CHUNKS = 2
# A chunk right behind a restore may pay for what the restore left to it, such as moving
# pages to a GPU. What it takes beyond this share of its prediction counts for the restore.
DISTURBED = 0.5
_HALF_CHUNKS = 16  # newer measurements until one counts half
_HALF_RESTORES = 2  # these differ more: a warm page cache, a cold one, a busy disk


@dataclass
class Model:
    """The measurements of one model. `chunks` are (offset, tokens, seconds), `restores` (bytes, seconds, time since 1970)."""

    chunks: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))
    restores: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_RESTORES))
    warm: bool = False  # the first chunk of a process compiles, and says nothing of the next
    unpaid: tuple[int, float, float] | None = None  # the last restore, while the chunk behind it has not come
    costs: np.ndarray | None = None  # of `chunks`, as long as none was added
    restore_costs: np.ndarray | None = None

    def chunk_costs(self) -> np.ndarray | None:
        if self.costs is None and len(self.chunks) >= LEAST_CHUNKS:
            offsets, counts, seconds = (np.array(column, float) for column in zip(*self.chunks, strict=True))
            # In this order: where chunks of one size alone were seen, the cost is taken to be the tokens', not the call's.
            features = np.stack([counts, counts * (offsets + counts / 2), np.ones_like(counts)], axis=1)
            self.costs = fit(features, seconds, _ages(len(seconds), _HALF_CHUNKS))
        return self.costs

    def read_costs(self) -> np.ndarray | None:
        if self.restore_costs is None and self.restores:
            sizes, seconds, _ = (np.array(column, float) for column in zip(*self.restores, strict=True))
            self.restore_costs = fit(np.stack([sizes, np.ones_like(sizes)], axis=1), seconds, _ages(len(seconds), _HALF_RESTORES))
        return self.restore_costs


def _ages(count: int, half: int) -> np.ndarray:
    return 0.5 ** (np.arange(count - 1, -1, -1) / half)


class Rates:
    """Measurements of all models, kept in `path`. Thread-safe; never raises for the file's sake."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time):
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._models: dict[str, Model] = {}
        self._changed = False
        self._saved_at = 0.0
        for fingerprint, (chunks, restores) in (read(path) if path is not None else {}).items():
            model = self._models[fingerprint] = Model()
            model.chunks.extend(chunks)
            model.restores.extend(restores)

    def prefilled(self, fingerprint: str, offset: int, tokens: int, seconds: float) -> None:
        """Note that `tokens` tokens behind `offset` others went through the model in `seconds`."""
        if tokens <= 0 or offset < 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            model = self._models.setdefault(fingerprint, Model())
            warm, model.warm = model.warm, True
            expected = _chunk_seconds(model, offset, offset + tokens) if warm else None
            excess = seconds - expected if expected is not None else 0.0
            disturbed = model.unpaid is not None and expected is not None and excess > DISTURBED * expected
            self._pay(model, excess if disturbed else 0.0)
            if warm and not disturbed and tokens >= SMALLEST_CHUNK:
                model.chunks.append((offset, tokens, seconds))
                model.costs = None
                self._changed = True

    def restored(self, fingerprint: str, size: int, seconds: float) -> None:
        """Note that `size` bytes were restored in `seconds`."""
        if size <= 0 or not 0 < seconds < math.inf:
            return
        with self._lock:
            model = self._models.setdefault(fingerprint, Model())
            self._pay(model, 0.0)
            model.unpaid = size, seconds, self._clock()

    def prefill_seconds(self, fingerprint: str, start: int, stop: int) -> float | None:
        """What the tokens from `start` to `stop` are expected to take; None without measurements."""
        with self._lock:
            model = self._models.get(fingerprint)
            return _chunk_seconds(model, start, stop) if model is not None else None

    def restore_seconds(self, fingerprint: str, size: int) -> float | None:
        """What a restore of `size` bytes is expected to take; None without measurements."""
        with self._lock:
            if (model := self._models.get(fingerprint)) is None:
                return None
            self._pay(model, 0.0)
            costs = model.read_costs()
            return float(costs[0] * size + costs[1]) if costs is not None else None

    def restore_age(self, fingerprint: str) -> float:
        """Seconds since the last restore that was measured."""
        with self._lock:
            model = self._models.get(fingerprint)
            return max(0.0, self._clock() - model.restores[-1][2]) if model is not None and model.restores else math.inf

    def report(self) -> dict[str, Any]:
        """What is known, by fingerprint, JSON-able."""
        with self._lock:
            return {fingerprint: _report(model) for fingerprint, model in self._models.items()}

    def save(self, every: float = 0.0) -> None:
        """Write the file, if something is new and the last time is `every` seconds ago. Not on the generation thread."""
        with self._lock:
            for model in self._models.values():
                self._pay(model, 0.0)
            if self._path is None or not self.due(every):
                return
            self._changed, self._saved_at = False, time.monotonic()
            found = {fingerprint: (list(m.chunks), list(m.restores)) for fingerprint, m in self._models.items()}
        write(self._path, found)

    def due(self, every: float) -> bool:
        """Whether `save` would write."""
        return self._path is not None and self._changed and time.monotonic() - self._saved_at >= every

    def _pay(self, model: Model, excess: float) -> None:
        if model.unpaid is not None:
            size, seconds, when = model.unpaid
            model.restores.append((size, seconds + excess, when))
            model.unpaid = model.restore_costs = None
            self._changed = True


def _chunk_seconds(model: Model, start: int, stop: int) -> float | None:
    if stop <= start:
        return 0.0
    costs = model.chunk_costs()
    if costs is None:
        return None
    count = stop - start
    calls = math.ceil(count / max(tokens for _, tokens, _ in model.chunks))
    return float(costs[0] * count + costs[1] * count * (start + count / 2) + costs[2] * calls)


def _report(model: Model) -> dict[str, Any]:
    read_costs = model.read_costs()

    def speed(offset: int) -> float | None:
        count = max((tokens for _, tokens, _ in model.chunks), default=0)
        seconds = _chunk_seconds(model, offset, offset + count)
        return round(count / seconds, 1) if seconds else None

    size = sum(size for size, _, _ in model.restores) / max(1, len(model.restores))
    return {
        "prefill_tokens_per_s": speed(0),
        "prefill_tokens_per_s_at_16k": speed(16384),
        "restore_bytes_per_s": round(size / float(read_costs[0] * size + read_costs[1])) if read_costs is not None else None,
        "restore_latency_ms": round(1000 * float(read_costs[1]), 3) if read_costs is not None else None,
        "prefill_chunks": len(model.chunks),
        "restores": len(model.restores),
    }
