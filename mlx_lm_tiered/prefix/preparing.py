"""Restores ahead of their requests: what a request that is held back waits for."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm_hooks import ModelSource, Taken

from ..cold.ahead import Ahead, Aheads
from ..cold.catalog import ColdEntry
from ..cold.restoring import Restorer
from .ssd import Fetch, SsdTier

# A store nearby says in so many seconds that it has nothing. A request that is held back is
# looked at every 0.5 s while others decode, so it is worth standing still for that answer.
AT_ONCE = 0.01


class Preparation(Ahead):
    """The contract's `Preparation`: one request's restore in the background. Generation thread only.

    It begins when the model's fingerprint and headers are known, and what others have computed is here, tries the next best
    entry when one turns out to be damaged, and ends with what `taken` gives.
    """

    key: bytes

    def __init__(self, ssd: SsdTier, restorer: Restorer, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int):
        super().__init__(restorer, source, key, self._settled_now, self._located)
        self._ssd = ssd
        self._tokens = tokens
        self._longer_than = longer_than
        self._length = 0
        self._asked = False  # whether others have it
        self._fetch: Fetch | None = None

    def _settled_now(self) -> bool:
        """Whether all that can be found is here: what the directory holds is known, and what others computed has come, or will not."""
        if not self._ssd.settled(self.source):
            return False
        if not self._asked:
            self._asked = True
            self._fetch = self._ssd.fetch(self.source, self._tokens, self.key, self._longer_than)
            if self._fetch is not None:
                self._fetch.wait(AT_ONCE)
        if self._fetch is not None and self._fetch.over():
            self._ssd.fetched(self.source, self.key, self._fetch)
            self._fetch = None
        return self._fetch is None

    def cancel(self) -> None:
        super().cancel()
        if self._fetch is not None:
            self._fetch.cancel()

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


class Preparations(Aheads[Preparation]):
    """Those of one prefix cache. Generation thread only."""

    def __init__(self, ssd: SsdTier, restorer: Restorer):
        super().__init__()
        self._ssd = ssd
        self._restorer = restorer

    def prepare(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Preparation | None:
        """Begin to restore the longest usable prefix of `tokens`; None when no stored one is longer than `longer_than`."""
        return self.begin(self.alone(source, tokens, key, longer_than))

    def alone(self, source: ModelSource, tokens: Sequence[int], key: bytes, longer_than: int) -> Preparation:
        """The same for a request that is not held back: whoever asked sees to it."""
        return Preparation(self._ssd, self._restorer, source, tokens, key, longer_than)
