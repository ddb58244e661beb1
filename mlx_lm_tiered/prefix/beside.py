"""Caches of a model beside the one that answers, a draft model: entries of their own in both tiers, under that model's identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm_hooks import ModelSource

from .preparing import Preparation
from .tiers import TieredPrefixCache


class Beside:
    """Looks up, and stores, what is beside one request. Generation thread only.

    The tiers' caps hold for all entries together. A request's end has these stored before its own, so that they are evicted first.
    """

    def __init__(self, cache: TieredPrefixCache, source: ModelSource):
        self._cache = cache
        self._source = source
        self._asked = False
        self._preparation: Preparation | None = None

    def ready(self, tokens: Sequence[int]) -> bool:
        """Whether a `take` of these tokens would find what there is without waiting. The first call begins to read it in the background."""
        if not self._asked:
            self._asked, self._preparation = True, self._cache.prepare(self._source, tokens)
        return self._preparation is None or self._preparation.step()

    def take(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """Caches that hold the first tokens, fewer than all, and how many; the caller owns them."""
        taken = self._cache.take_prepared(self._source, tokens, self._preparation)
        return (taken.caches, taken.length) if taken is not None else None

    def put(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Store caches that hold the tokens; the caller gives them up."""
        self._cache.put(self._source, tokens, caches)

    def keep(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Store a copy where caches that have grown could not serve these tokens any more; the caller goes on with its own."""
        self._cache.snapshot(self._source, tokens, caches)

    def cancel(self) -> None:
        """Nothing will be taken."""
        if self._preparation is not None:
            self._preparation.cancel()
