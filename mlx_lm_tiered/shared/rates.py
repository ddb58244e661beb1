"""What fetching costs, measured while serving, and whether it pays against prefilling."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from ..prefix.fit import fit

KEPT = 16
HALF = 4  # newer fetches until one counts half: networks change
# Fetching must be expected to take less than this share of computing. What it does not
# save a request, it costs those that share the machine and the network.
PAYS = 0.5
# Seconds that a request waits for the store, at least and at most. Between these it is
# the share of above of what computing would take, so that a slow store costs little.
LEAST = 1.0
MOST = 10.0
LOOKUP = 2.0  # seconds for finding out what there is


class Network:
    """A fetch of `size` bytes is taken to cost ``c + a*size`` seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetches: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def fetched(self, size: int, seconds: float) -> None:
        """Note a fetch, whole or as far as it came."""
        if size > 0 and seconds > 0:
            with self._lock:
                self._fetches.append((size, seconds))

    def seconds(self, size: int) -> float | None:
        """What fetching so many bytes is expected to take; None: not measured yet."""
        with self._lock:
            costs = self._costs()
        return float(costs[0] * size + costs[1]) if costs is not None else None

    def _costs(self) -> np.ndarray | None:
        if not self._fetches:
            return None
        sizes, seconds = (np.array(column, float) for column in zip(*self._fetches, strict=True))
        ages = 0.5 ** (np.arange(len(sizes) - 1, -1, -1) / HALF)
        return fit(np.stack([sizes, np.ones_like(sizes)], axis=1), seconds, ages)

    def pays(self, size: int, computing: float | None) -> bool:
        """Whether to fetch so many bytes in place of computing for so many seconds. What was not measured yet is tried."""
        expected = self.seconds(size)
        return expected is None or computing is None or expected < PAYS * computing

    def report(self) -> dict[str, float | None]:
        """What is known, JSON-able."""
        with self._lock:
            costs = self._costs()
            size = sum(size for size, _ in self._fetches) / max(1, len(self._fetches))
        return {
            "bytes_per_s": round(size / float(costs[0] * size + costs[1])) if costs is not None else None,
            "latency_ms": round(1000 * float(costs[1]), 3) if costs is not None else None,
        }


def patience(computing: float | None) -> float:
    """Seconds that a request waits for its bytes, when computing would take so many."""
    return MOST if computing is None else min(MOST, max(LEAST, PAYS * computing))
