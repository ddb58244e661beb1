"""A restore ahead of its request: begun when everything is known that is needed to choose an entry, and taken when the request is served."""

from __future__ import annotations

import time
from collections.abc import Callable

from .catalog import ColdEntry
from .restore import Restored
from .restoring import Restorer, Ticket

TRIES = 3  # entries that one request tries to restore


class Ahead:
    """The contract's `Preparation`: one request's restore in the background. Generation thread only.

    `settled` tells whether the entries are known, `locate` chooses one (None: there is
    nothing to restore); it is asked again when the one before turned out to be damaged.
    """

    def __init__(self, restorer: Restorer, settled: Callable[[], bool], locate: Callable[[], ColdEntry | None]):
        self._restorer = restorer
        self._settled = settled
        self._locate = locate
        self._ticket: Ticket | None = None
        self._tries = 0
        self._ended = False
        self.closed = False  # whether nobody will take what was restored
        self._started = time.monotonic()

    def step(self) -> bool:
        if self._ended:
            return True
        if self._ticket is None:
            if not self._settled():
                return False
            entry = self._locate() if self._tries < TRIES else None
            if entry is None:
                self._ended = True
                return True
            self._tries += 1
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

    @property
    def found(self) -> bool:
        """Whether something was restored, and not taken yet."""
        return self._ended and self._ticket is not None

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
