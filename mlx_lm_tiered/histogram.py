"""Histograms as Prometheus has them: observations counted by upper bounds."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many observations were at most each of `bounds`, which rise. Thread-safe."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[float, int]], float]:
        """(bound, observations up to it) for each bound, infinity last; and the sum of all observations."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            seen += count
            found.append((bound, seen))
        return found, total
