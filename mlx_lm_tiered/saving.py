"""Having everything that was put so far on disk, or saying what is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .prefix.tiers import TieredPrefixCache
from .storage import Storage

# Even a flush without time to write asks whether there is anything to write.
ANSWER_WAIT = 0.5


class Saver:
    """Flushes, of the prefix caches that `caches` names. `wake` asks the engine for idle turns, `alive` says whether it takes any."""

    def __init__(
        self, storage: Storage, caches: Callable[[], list[TieredPrefixCache]], wake: Callable[[], None], alive: Callable[[], bool]
    ):
        self._storage = storage
        self._caches = caches
        self._wake = wake
        self._alive = alive
        self._questions = _Questions()

    def flush(self, timeout: float) -> dict[str, Any]:
        """Have everything put so far on disk, or say what is not. Any thread but the generation thread.

        Returns ``durable`` and its evidence. Entries that nothing queued yet are
        queued one at a time, so that the queue's cap cannot drop them.
        """
        storage = self._storage
        deadline = time.monotonic() + timeout
        answer_by = max(deadline, time.monotonic() + ANSWER_WAIT)
        tried: set[int] = set()
        self._await_identities(deadline)
        while True:
            result = storage.queue.flush(max(0.0, deadline - time.monotonic()))
            answer = self._questions.ask(tried, answer_by, self._wake, self._alive)
            if answer is not True or time.monotonic() > deadline:
                break
        kept = storage.checkpoints.flush(max(0.0, deadline - time.monotonic())) if storage.checkpoints is not None else (0, 0)
        # A thread that gave no answer in time may hold entries nobody counted.
        unsaved = self._questions.unsaved
        given_up = sum(cache.unsaved.lost for cache in self._caches())
        return {
            "durable": result.durable and answer is False and unsaved == given_up == 0 and kept == (0, 0),
            "pending": result.pending + unsaved + kept[0],
            "dropped": result.dropped + given_up,
            "failed": result.failed + kept[1],
            "entries": result.entries,
            "longest_durable_prefix_tokens": result.longest_durable_prefix,
        }

    def turn(self) -> None:
        """Answer a flush that asks for unsaved entries; on the generation thread."""
        self._questions.turn(self._offer_unsaved)

    def _await_identities(self, deadline: float) -> None:
        """Wait until the models of all entries are fingerprinted: without it nothing of them can be written."""
        for source in {entry.source for cache in self._caches() for entry in cache.entries()}:
            self._storage.identities.get(source, max(0.0, deadline - time.monotonic()))

    def _offer_unsaved(self, tried: set[int]) -> tuple[bool, int]:
        """Queue one entry the SSD tier lacks and this flush has not tried. Whether there was one, and how many are still missing."""
        caches, tier, limit = self._caches(), self._storage.tier, self._storage.store.max_bytes
        for cache in caches:
            cache.unsaved.settle(tier.covers_tokens)
        entries = [entry for cache in caches for entry in cache.entries()]
        missing = {id(entry) for entry in entries if not tier.covers(entry)}
        # Oldest first, so that the newest are the last to be evicted; but none that has no room
        # beside the newer ones: they would evict it again, and every flush would write it anew.
        room = limit - limit // 8  # headers, directories and side files take some
        fitting = [entry for entry in reversed(entries) if (room := room - entry.nbytes - 8 * entry.length) >= 0]
        for entry in reversed(fitting):
            if id(entry) in missing and id(entry) not in tried:
                tried.add(id(entry))
                tier.offer(entry, kept=any(entry in cache.ram for cache in caches))
                return True, len(missing)
        return False, len(missing)


class _Questions:
    """The line between threads that flush and the generation thread that owns the entries."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._question: set[int] | None = None
        self._answer: bool | None = None
        self._one_at_a_time = threading.Lock()
        self.unsaved = 0

    def ask(self, tried: set[int], deadline: float, wake: Callable[[], None], alive: Callable[[], bool]) -> bool | None:
        """Have the generation thread queue one more unsaved entry. True: it did; False: there is none; None: no answer in time, or no thread that could give one."""
        with self._one_at_a_time, self._condition:
            self._question, self._answer = tried, None
            while self._answer is None and alive() and (left := deadline - time.monotonic()) > 0:
                wake()
                self._condition.wait(min(left, 0.25))
            self._question = None
            return self._answer

    def turn(self, offer: Callable[[set[int]], tuple[bool, int]]) -> None:
        """Answer a waiting question; on the generation thread."""
        if self._question is None:
            return
        with self._condition:
            if self._question is not None and self._answer is None:
                self._answer, self.unsaved = offer(self._question)
                self._condition.notify_all()

