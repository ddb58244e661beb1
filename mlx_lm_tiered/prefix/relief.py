"""Freeing memory that stored prefixes hold: what is on disk first, then what can be written in a moment, least recently used first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_lm_hooks import ModelSource

from ..index.keys import token_key
from .ram import Entry
from .tiers import TieredPrefixCache

if TYPE_CHECKING:
    from ..cold.spill import SpillQueue

# Seconds that one relief may spend on writing: everything that decodes stands still meanwhile.
PATIENCE = 2.0


Choose = Callable[[Sequence[Entry]], Entry | None]


def _first(entries: Sequence[Entry]) -> Entry | None:
    """The first that takes memory of its own."""
    return next((entry for entry in entries if entry.own_nbytes), None)


class Relief:
    """Frees entries of all RAM tiers. Generation thread only, but for `report` and `held`."""

    def __init__(self, caches: Callable[[], Iterable[TieredPrefixCache]], queue: Callable[[], SpillQueue | None], clock: Callable[[], float] = time.monotonic):
        self._caches = caches
        self._queue = queue
        self._clock = clock
        self._freed = self._freed_bytes = self._lost = 0

    def entry_for(self, source: ModelSource | None, tokens: Sequence[int], cached: int) -> Entry | None:
        """The entry in RAM whose buffers a request shares that reuses `cached` tokens of `tokens`."""
        if source is None or cached == 0:
            return None
        key = token_key(tokens)
        for cache in self._caches():
            found = cache.lender(source, tokens, key)
            if found is not None and found[1] >= cached:
                return found[0]
        return None

    def until(self, enough: Callable[[], bool], spare: Entry | None = None, choose: Choose = _first) -> bool:
        """Free entries until `enough()`, but not `spare`. False when everything else is freed and it still is not.

        `choose` says of those that are left, least recently used first, which goes next; None when the others are of no use.
        """
        if enough():
            return True
        for cache, entry in self._entries(spare, choose):
            if cache.returns(entry):
                self._free(cache, entry)
                if enough():
                    return True
        if (queue := self._queue()) is not None and self._written(queue, enough, spare, choose):
            return True
        # What is left could not be written in time. A cache must not stand in the way of a request.
        for cache, entry in self._entries(spare, choose):
            self._free(cache, entry)
            if queue is not None:
                self._lost += 1
                queue.shed(entry.key)
            if enough():
                return True
        while queue is not None and queue.shed(but=spare.key if spare is not None else None):
            self._lost += 1
            if enough():
                return True
        # Arrays may be held by work that the device has not finished.
        mx.synchronize()
        mx.clear_cache()
        return enough()

    def give_up(self, entry: Entry, enough: Callable[[], bool]) -> bool:
        """Free this entry as well, if that is enough."""
        if not enough():
            return False
        queue = self._queue()
        for cache in self._caches():
            if cache.returns(entry) or (queue is not None and cache.save_now(entry, queue, self._clock() + PATIENCE)):
                continue
            self._lost += 1
            if queue is not None:
                queue.shed(entry.key)
        for cache in self._caches():
            if entry in cache.ram:
                self._free(cache, entry)
        return True

    def held(self) -> int:
        """Bytes of all entries in RAM. Any thread."""
        return sum(cache.nbytes for cache in list(self._caches()))

    def report(self) -> dict[str, Any]:
        """For `/stats`. Any thread."""
        return {"relieved_entries": self._freed, "relieved_bytes": self._freed_bytes, "relieved_unsaved": self._lost}

    def _entries(self, spare: Entry | None, choose: Choose) -> Iterator[tuple[TieredPrefixCache, Entry]]:
        """All entries but `spare`, as they are chosen: what one frees depends on who went before it."""
        left = {entry: cache for cache in self._caches() for entry in cache.entries() if entry is not spare}
        order = sorted(left, key=lambda entry: entry.last_used)
        while order and (entry := choose(order)) is not None:
            order.remove(entry)
            yield left[entry], entry

    def _written(self, queue: SpillQueue, enough: Callable[[], bool], spare: Entry | None, choose: Choose) -> bool:
        """Write entries and free them, until it is enough or time is up."""
        deadline = self._clock() + PATIENCE
        for cache, entry in self._entries(spare, choose):
            if not cache.save_now(entry, queue, deadline):
                if self._clock() > deadline:
                    break
                continue
            self._free(cache, entry)
            if enough():
                return True
        # Entries that have left RAM already are held until they are written.
        return queue.write_now(enough, deadline) and enough()

    def _free(self, cache: TieredPrefixCache, entry: Entry) -> None:
        self._freed += 1
        self._freed_bytes += entry.nbytes
        cache.release(entry)
