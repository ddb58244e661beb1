"""Restores ahead of their requests, so that those that decode go on meanwhile: each begun when all is known that is needed to choose an entry, and taken when its request is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from mlx_lm_hooks import ModelSource

from ..index.keys import key_tokens
from .catalog import ColdEntry
from .restore import Restored
from .restoring import Restorer, Ticket

TRIES = 3  # entries that one request tries to restore


class Ahead:
    """The contract's `Preparation`: the restore in the background of one request, which `source` and `key` name. Generation thread only.

    `settled` tells whether the entries are known, `locate` chooses one (None: there is
    nothing to restore); it is asked again when the one before turned out to be damaged.
    """

    def __init__(
        self, restorer: Restorer, source: ModelSource, key: Hashable, settled: Callable[[], bool], locate: Callable[[], ColdEntry | None]
    ):
        self.source = source
        self.key = key
        self._restorer = restorer
        self._settled = settled
        self._locate = locate
        self._ticket: Ticket | None = None
        self._tries = 0
        self._ended = False
        self.closed = False  # whether nobody will take what was restored
        self._started = time.monotonic()

    def step(self) -> bool:
        while not self._ended:
            if self._ticket is None and not self._begin():
                return self._ended
            assert self._ticket is not None
            if not self._ticket.done:
                return False
            if not self._ticket.restoring.failed:
                self._ended = True
            else:
                self._restorer.release(self._ticket)
                self._ticket = None
        return True

    def _begin(self) -> bool:
        """Have the next entry read; False when it is too early for that, or there is none."""
        if not self._settled():
            return False
        entry = self._locate() if self._tries < TRIES else None
        if entry is None:
            self._ended = True
            return False
        self._tries += 1
        self._ticket = self._restorer.start(entry)
        return True

    def cancel(self) -> None:
        self._ended = self.closed = True
        if self._ticket is not None:
            self._restorer.release(self._ticket)
            self._ticket = None

    @property
    def found(self) -> bool:
        """Whether something was restored, and not taken yet."""
        return self._ended and self._ticket is not None

    @property
    def tokens(self) -> list[int]:
        """Of the entry that is being restored, or was."""
        return key_tokens(self._ticket.entry.key) if self._ticket is not None else []

    def caches(self) -> tuple[ColdEntry, Restored] | None:
        """The entry that was restored, with its caches, once; None when nothing was, or not yet."""
        ticket, self._ticket = self._ticket, None
        self._ended = self.closed = True
        if ticket is None:
            return None
        try:
            caches = ticket.restoring.caches() if ticket.done else None
            return (ticket.entry, caches) if caches is not None else None
        finally:
            self._restorer.release(ticket)

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self._started


One = TypeVar("One", bound=Ahead)


class Aheads(Generic[One]):
    """Those that are under way. Generation thread only."""

    def __init__(self) -> None:
        self._open: list[One] = []
        self.seconds = {"last": 0.0, "total": 0.0}  # that requests were held back for; may be read from anywhere

    def begin(self, one: One) -> One | None:
        """Begin with it; None when there is nothing to wait for."""
        if one.step():
            one.cancel()
            return None
        self._open = [other for other in self._open if not other.closed] + [one]
        return one

    def of(self, source: ModelSource, key: Hashable) -> list[One]:
        """Those of the same request; several when it was sent more than once."""
        return [one for one in self._open if not one.closed and (one.source, one.key) == (source, key)]

    def claim(self, source: ModelSource, key: Hashable) -> One | None:
        """What was restored for this request, once it is about to be served. The caller takes the caches."""
        one = next((one for one in self.of(source, key) if one.step()), None)
        if one is not None:
            self._open.remove(one)
            seconds = one.seconds
            self.seconds = {"last": seconds, "total": self.seconds["total"] + seconds}
        return one

    def cancel(self, source: ModelSource) -> None:
        """Give up those of a model that goes."""
        for one in self._open:
            if one.source == source:
                one.cancel()
