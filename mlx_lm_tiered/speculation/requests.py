"""Speculation of a server's requests: implements the contract's `Speculation` over one draft source."""

from __future__ import annotations

import logging
from typing import Any

from mlx_lm_hooks import Speculator, SpeculativeRow

from ..caches import UnknownCacheClass, kind_of
from ..statistics import Statistics
from .executor import Executor
from .rollback import singles
from .source import Drafter, DraftSource
from .tally import Tally

logger = logging.getLogger("mlx_lm_tiered")


class Speculating:
    """`tokens` is how many are drafted at a time; None leaves that to the source."""

    def __init__(self, source: DraftSource, tokens: int | None, statistics: Statistics):
        self._source = source
        self.tokens = tokens if tokens is not None else source.tokens
        self._statistics = statistics
        self._tally = Tally()
        self._refused = ""

    def model_loaded(self, model: Any) -> None:
        """Say at once whether this model's requests can speculate."""
        from mlx_lm.models.cache import make_prompt_cache

        self._refused = _refusal(make_prompt_cache(model))
        if self._refused:
            logger.warning("speculation %s is not for this model: %s", self._source.name, self._refused)

    def begin(self, model: Any, row: SpeculativeRow) -> Speculator | None:
        if self._refused or _refusal(row.caches):
            return None
        self._tally.requests += 1
        return _Request(self._source.begin(model), Executor(model, self._tally), self.tokens, self._statistics)

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        return {"source": self._source.name, "draft_tokens": self.tokens, "refused": self._refused or None, **self._tally.report()}


class _Request:
    """Implements `Speculator`."""

    def __init__(self, drafter: Drafter, executor: Executor, tokens: int, statistics: Statistics):
        self._drafter: Drafter | None = drafter
        self._executor = executor
        self._tokens = tokens
        self._statistics = statistics
        self._calls = self._drafted = self._accepted = 0

    def advance(self, row: SpeculativeRow) -> bool:
        most = min(self._tokens, row.room)
        if most < 1 or self._drafter is None:
            return False
        try:
            drafts = self._drafter.draft(row.tokens, row.pending, most, row.caches)[:most] if self._drafter.hopes(row.tokens) else []
        except Exception as error:
            # Nothing was forwarded yet: the request goes on without drafts.
            self._drafter = None
            self._statistics.fault("drafting", f"drafting failed: {type(error).__name__}: {error}; the request decodes plainly")
            return False
        if not drafts:
            return False
        accepted = self._executor.round(row, drafts)
        self._calls, self._drafted, self._accepted = self._calls + 1, self._drafted + len(drafts), self._accepted + accepted
        self._drafter.verified(len(drafts), accepted)
        return True

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        self._executor.rewind(row, count)

    def usage(self) -> dict[str, int]:
        return {"drafted_tokens": self._drafted, "accepted_tokens": self._accepted, "target_calls": self._calls}


def _refusal(caches: Any) -> str:
    """Why caches cannot be rolled back; empty when they can."""
    try:
        for cache in singles(caches):
            kind_of(cache)
    except UnknownCacheClass as error:
        return str(error)
    return ""
