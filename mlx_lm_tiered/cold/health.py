"""Small judgements the store makes from what it has seen: is the directory usable, does checking pay, is this worth a line in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable

logger = logging.getLogger("mlx_lm_tiered")

RETRY_AFTER = 30.0  # seconds until a directory that failed is tried again
MAX_KNOWN = 100_000  # files remembered as checked
MAX_LINES = 5  # warnings of one kind; later ones are only counted


class Outage:
    """Whether reading and writing the directory are worth trying. One warning when it stops working, one line when all of it works again.

    `kind` is ``read`` or ``write``: a read-only directory can still be read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, retry_after: float = RETRY_AFTER):
        self._clock = clock
        self._retry_after = retry_after
        self._until: dict[str, float] = {}

    def retry_in(self, kind: str) -> float:
        """Seconds to wait before the next try; 0 when there is nothing to wait for."""
        return max(0.0, self._until.get(kind, 0.0) - self._clock()) if kind in self._until else 0.0

    def failed(self, kind: str, what: str, error: OSError) -> None:
        """Note a failure."""
        if not self._until:
            logger.warning("SSD cache: %s failed (%s); serving goes on, and it is tried again", what, error)
        self._until[kind] = self._clock() + self._retry_after

    def worked(self, kind: str) -> None:
        """Note a success."""
        if self._until.pop(kind, None) is not None and not self._until:
            logger.info("SSD cache: the directory works again")


class Bounded:
    """Warnings with a limit for each kind."""

    def __init__(self, limit: int = MAX_LINES):
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def warn(self, kind: str, message: str, *args: object, limit: int | None = None) -> None:
        limit = limit or self._limit
        self._counts[kind] += 1
        if self._counts[kind] < limit:
            logger.warning(message, *args)
        elif self._counts[kind] == limit:
            logger.warning(message + " (further ones are only counted)", *args)


class Checking:
    """Decides whether the next restore compares checksums.

    ``auto`` checks every file at its first restore in this process, and again while
    hashing a byte takes no longer than reading it did lately; every 16th restore is
    checked anyway, so that the measurement stays fresh.
    """

    MODES = ("auto", "always", "never")

    def __init__(self, mode: str):
        if mode not in self.MODES:
            raise ValueError(f"verify must be one of {', '.join(self.MODES)}, not {mode!r}")
        self.mode = mode
        self._read: float | None = None  # seconds per byte
        self._hash: float | None = None
        self._skipped = 0
        self._known: set[Hashable] = set()
        self._lock = threading.Lock()

    def wanted(self, files: Collection[Hashable] = ()) -> bool:
        """Whether to check the next restore, which needs these files."""
        if self.mode != "auto":
            return self.mode == "always"
        with self._lock:
            if not self._known.issuperset(files):
                return True
            if self._read is None or self._hash is None or self._hash <= self._read or self._skipped >= 15:
                self._skipped = 0
                return True
            self._skipped += 1
            return False

    def found_sound(self, files: Collection[Hashable]) -> None:
        """Note that these were checked."""
        with self._lock:
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
            self._known.update(files)

    def measured(self, size: int, read_seconds: float, hash_seconds: float | None) -> None:
        """Note one restore of `size` bytes; None when it was not checked. Recent ones weigh a quarter."""
        if size <= 0:
            return
        with self._lock:
            self._read = _blend(self._read, read_seconds / size)
            if hash_seconds is not None:
                self._hash = _blend(self._hash, hash_seconds / size)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else 0.75 * old + 0.25 * new
