"""Restores ahead of their requests: what a request that is held back waits for."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm_hooks import ModelSource, Taken

from ..cold.ahead import Ahead
from ..cold.catalog import ColdEntry
from ..cold.restoring import Restorer
from .ssd import SsdTier


class Preparation(Ahead):
    """The contract's `Preparation`: one request's restore in the background. Generation thread only.

    It begins when the model's fingerprint and headers are known, tries the next best
    entry when one turns out to be damaged, and ends with what `taken` gives.
    """

    def __init__(self, ssd: SsdTier, restorer: Restorer, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int):
        super().__init__(restorer, lambda: ssd.settled(source), self._located)
        self.source = source
        self.key = key
        self._ssd = ssd
        self._tokens = tokens
        self._longer_than = longer_than
        self._length = 0

    def _located(self) -> ColdEntry | None:
        located = self._ssd.locate(self.source, self._tokens, self.key, self._longer_than)
        if located is None:
            return None
        entry, self._length = located
        return entry

    def taken(self) -> Taken | None:
        """What was restored, once; None when nothing was, or not yet."""
        restored = self.caches()
        return self._ssd.cut(*restored, self._length) if restored is not None else None


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
