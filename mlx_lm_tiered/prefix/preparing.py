"""Restores ahead of their requests: what a request that is held back waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_lm_hooks import ModelSource, Taken

from ..cold.restoring import Restorer, Ticket
from .ssd import TRIES, SsdTier


class Preparation:
    """The contract's `Preparation`: one request's restore in the background. Generation thread only.

    It begins when the model's fingerprint and headers are known, tries the next best
    entry when one turns out to be damaged, and ends with what `taken` gives.
    """

    def __init__(self, ssd: SsdTier, restorer: Restorer, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int):
        self.source = source
        self.key = key
        self._ssd = ssd
        self._restorer = restorer
        self._tokens = tokens
        self._longer_than = longer_than
        self._ticket: Ticket | None = None
        self._length = 0
        self._tries = 0
        self._ended = False
        self.closed = False  # whether nobody will take what was restored
        self._started = time.monotonic()

    def step(self) -> bool:
        if self._ended:
            return True
        if self._ticket is None:
            if not self._ssd.settled(self.source):
                return False
            located = self._ssd.locate(self.source, self._tokens, self.key, self._longer_than) if self._tries < TRIES else None
            if located is None:
                self._ended = True
                return True
            self._tries += 1
            entry, self._length = located
            self._ticket = self._restorer.start(entry)
        if not self._ticket.done:
            return False
        if self._ticket.restoring.failed:
            self._restorer.release(self._ticket)
            self._ticket = None
            return self.step()
        self._ended = True
        return True

    def cancel(self) -> None:
        self._ended = self.closed = True
        if self._ticket is not None:
            self._restorer.release(self._ticket)
            self._ticket = None

    def taken(self) -> Taken | None:
        """What was restored, once; None when nothing was, or not yet."""
        ticket, self._ticket = self._ticket, None
        self._ended = self.closed = True
        if ticket is None:
            return None
        try:
            caches = ticket.restoring.caches() if ticket.done else None
            return self._ssd.cut(ticket.entry, caches, self._length) if caches is not None else None
        finally:
            self._restorer.release(ticket)

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self._started


class Preparations:
    """Those of one prefix cache. Generation thread only."""

    def __init__(self, ssd: SsdTier, restorer: Restorer):
        self._ssd = ssd
        self._restorer = restorer
        self._open: list[Preparation] = []
        self.seconds = {"last": 0.0, "total": 0.0}  # that requests were held back for; may be read from anywhere

    def begin(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Preparation | None:
        """Begin to restore the longest usable prefix of `tokens`; None when no stored one is longer than `longer_than`."""
        preparation = Preparation(self._ssd, self._restorer, source, tokens, key, longer_than)
        if preparation.step():
            preparation.cancel()
            return None
        self._open = [one for one in self._open if not one.closed] + [preparation]
        return preparation

    def claim(self, source: ModelSource, key: bytes) -> Preparation | None:
        """The preparation of a request with these tokens, once it is about to be served."""
        for preparation in self._open:
            if not preparation.closed and preparation.source == source and preparation.key == key and preparation.step():
                self._open.remove(preparation)
                seconds = preparation.seconds
                self.seconds = {"last": seconds, "total": self.seconds["total"] + seconds}
                return preparation
        return None

    def cancel(self, source: ModelSource) -> None:
        """Give up those of a model that goes."""
        for preparation in self._open:
            if preparation.source == source:
                preparation.cancel()
