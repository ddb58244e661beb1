"""What the store counts, and the uses of files that it notes in their modification times."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from .catalog import ColdEntry

# Nanoseconds; time stamps beyond (the year 2116) are nonsense that nobody should go on from.
MAX_TIME = 1 << 62

# What `stats` counts: bytes and tokens where the name says so, else events.
COUNTERS = (
    "restores", "restored_bytes", "restored_tokens", "stored", "stored_bytes", "superseded", "evictions", "quarantined",
    "corrupt", "gone", "read_errors", "write_errors", "skipped_too_large", "written_bytes", "new_token_bytes", "continued",
    "not_identical", "compactions", "compacted", "compacted_bytes", "aged_out", "found_later",
)  # fmt: skip


class Tally:
    """Thread-safe. `usage` are the directory's bytes when it was last looked at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last_use = 0
        self.usage = 0

    def add(self, name: str, number: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._counts[name] += number

    def update(self, **numbers: int) -> None:
        """Add to several at once."""
        with self._lock:
            self._counts.update(numbers)

    def counts(self) -> dict[str, int]:
        """All counters, those that are zero too."""
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}

    def now(self) -> int:
        """Nanoseconds since 1970, never the same twice, so that the order of uses is their order in the files."""
        with self._lock:
            self._last_use = max(self._last_use + 1, time.time_ns())
            return self._last_use

    def go_on_from(self, last: int) -> None:
        """Let uses from now on be later than any in the files: the clock may have been set back since."""
        if last < MAX_TIME:
            with self._lock:
                self._last_use = max(self._last_use, last)

    def used(self, file: Path | int) -> None:
        """Note the use of a file, in the file. Raises OSError."""
        now = self.now()
        os.utime(file, ns=(now, now))

    def use(self, entry: ColdEntry) -> None:
        """Note the use of an entry, in all its files."""
        with suppress(OSError):  # recency is not worth what was just done
            for one in reversed(entry.chain):
                self.used(one.path)
