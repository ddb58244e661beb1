"""An engine that does nothing, for a runtime without a server."""

from __future__ import annotations


class Engine:
    busy = decoding = stopping = False
    alive = True
    waiting = 0
    request = None

    def wake(self) -> None:
        pass
