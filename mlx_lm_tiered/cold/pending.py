"""Jobs that wait to be written and jobs that are being written, in order and by their tokens.

What has left RAM and is not on disk yet is only here, so requests look here too.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator

from ..index.prefixes import PrefixIndex
from .jobs import Job


class Pending:
    """At most one job for each place (fingerprint, namespace, tokens). Not thread-safe."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []  # first offered first
        self._flying: dict[Hashable, Job] = {}  # by what writes them
        self._indexes: dict[tuple[str, str], PrefixIndex[Job]] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self._flying)

    def __iter__(self) -> Iterator[Job]:
        """Those that wait, then those in flight; either may change meanwhile."""
        return iter([*self.waiting, *self._flying.values()])

    @property
    def flying(self) -> list[Job]:
        """The jobs that are being written."""
        return list(self._flying.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all their caches."""
        return sum(job.nbytes for job in self)

    def add(self, job: Job) -> None:
        """Have a job wait, or wait again: in its place by age."""
        insort(self.waiting, job, key=lambda other: other.number)
        self._indexes.setdefault(job.place[:2], PrefixIndex()).add(job)

    def remove(self, job: Job) -> None:
        """No longer have a job wait."""
        self.waiting.remove(job)
        self._forget(job)

    def next(self, may: Callable[[Job], bool]) -> Job | None:
        """Of those that wait and `may` be written, an urgent one, else the one offered first."""
        able = [job for job in self.waiting if may(job)]
        return next((job for job in able if job.urgent), able[0] if able else None)

    def shrink(self, max_bytes: int) -> Iterator[Job]:
        """Take out those that were offered first until no more than `max_bytes` are held; never the last one, nor what is in flight."""
        excess = self.nbytes - max_bytes
        while excess > 0 and len(self.waiting) > 1:
            victim = self.waiting[0]
            self.remove(victim)
            excess -= victim.nbytes
            yield victim

    def fly(self, job: Job, write: Hashable) -> None:
        """A job that waited is written by `write` from now on."""
        self.waiting.remove(job)
        self._flying[write] = job

    def land(self, write: Hashable) -> Job:
        """`write` has ended; its job, no longer here."""
        job = self._flying.pop(write)
        self._forget(job)
        return job

    def stats(self) -> dict[str, int]:
        """How many there are, in flight too, and their bytes; a snapshot's entry is still in RAM, a spill's is not."""
        spills = [job for job in self if not job.kept]
        return {
            "pending": len(self),
            "pending_bytes": self.nbytes,
            "pending_snapshots": len(self) - len(spills),
            "pending_spills": len(spills),
            "pending_spill_bytes": sum(job.nbytes for job in spills),
        }

    def best(self, fingerprint: str, namespace: str, key: bytes, usable: Callable[[Job, int], int]) -> tuple[Job, int] | None:
        """The job that serves the longest prefix of `key`, and that length (see `PrefixIndex.best`)."""
        index = self._indexes.get((fingerprint, namespace))
        return index.best(key, usable) if index is not None else None

    def _forget(self, job: Job) -> None:
        index = self._indexes[job.place[:2]]
        index.remove(job)
        if not len(index):
            del self._indexes[job.place[:2]]
