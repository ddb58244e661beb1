"""What was offered and is not durable yet: the record from which a flush answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from .jobs import Job


class FlushResult(NamedTuple):
    """`durable`: everything offered before the flush is on disk. The rest is the evidence, in entries; the longest prefix in tokens."""

    durable: bool
    pending: int
    dropped: int
    failed: int
    entries: int
    longest_durable_prefix: int


class Ledger:
    """Which tokens were offered and are not on disk yet. Not thread-safe.

    A record outlives its job when that was dropped, failed or gave way to a longer
    one: only the store can say that its tokens are safe after all. Records without
    a job are bounded in bytes; one that must be forgotten leaves a mark.
    """

    MAX_BYTES = 64 << 20

    def __init__(self) -> None:
        self._records: dict[tuple[str, str, bytes], tuple[int, str]] = {}
        self._bytes = 0
        self.forgotten = 0

    def note(self, job: Job, state: str) -> None:
        """`state` is ``pending``, ``superseded``, ``dropped`` or ``failed``. Tokens offered again stay as old as they were: a flush that runs waits for them all the same."""
        job.serial = min(job.serial, self._records.get(job.place, (job.serial,))[0])
        self.clear(job.place)
        self._records[job.place] = job.serial, state
        self._bytes += len(job.key)
        for place, (_, old) in list(self._records.items()):
            if self._bytes <= self.MAX_BYTES:
                break
            if old != "pending" and place != job.place:
                self.clear(place)
                self.forgotten += 1

    def clear(self, place: tuple[str, str, bytes]) -> None:
        """These tokens are on disk."""
        if self._records.pop(place, None) is not None:
            self._bytes -= len(place[2])

    def settle(self, covered: Any) -> None:
        """Clear every record without a job whose tokens `covered(fingerprint, namespace, key)` says are on disk."""
        for place, (_, state) in list(self._records.items()):
            if state != "pending" and covered(*place):
                self.clear(place)

    def count(self, *states: str, until: int | None = None) -> int:
        """Records in these states, of jobs offered up to the serial `until`."""
        return sum(s in states and (until is None or serial <= until) for serial, s in self._records.values())

    def result(self, until: int, pending: int, entries: int, longest: int) -> FlushResult:
        """A flush's answer about jobs offered up to the serial `until`."""
        return FlushResult(
            durable=self.count("pending", "superseded", "dropped", "failed", until=until) == 0 and self.forgotten == 0,
            pending=pending,
            dropped=self.count("dropped") + self.forgotten,
            failed=self.count("failed"),
            entries=entries,
            longest_durable_prefix=longest,
        )

    def __len__(self) -> int:
        return len(self._records)
