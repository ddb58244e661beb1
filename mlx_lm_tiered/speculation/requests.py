"""Speculation of a server's requests: implements the contract's `Speculation` over one draft source."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks import Speculator, SpeculativeRow

from ..caches import UnknownCacheClass, kind_of
from ..settings import AUTO
from ..statistics import Statistics
from .acceptance import Rejection, Rule, Target
from .auto import Auto
from .choose import MOST
from .executor import Executor
from .pricing import price
from .request import Request
from .rollback import singles
from .source import DraftSource
from .strict import Stepwise
from .tally import Tally
from .trace import Trace

logger = logging.getLogger("mlx_lm_tiered")


class Speculating:
    """`tokens` is how many are drafted at a time, or ``auto``; None leaves that to the source. With `strict` each token is computed as without drafts.

    `sampling` says who decides the tokens of requests that draw them: the ``target``'s sampler, or ``rejection``.
    """

    def __init__(
        self,
        source: DraftSource,
        tokens: int | str | None,
        statistics: Statistics,
        clock: Callable[[], float] = time.perf_counter,
        *,
        strict: bool = False,
        sampling: str = "target",
        trace: Trace | None = None,
    ):
        self.source = source
        self._strict = strict
        self._sampling = sampling
        self._trace = trace
        self._auto = Auto(clock)
        self.tokens = tokens if tokens is not None else source.tokens
        self._statistics = statistics
        self._tally = Tally()
        self._chooses = self.tokens == AUTO  # whether some request does
        self._model: Callable[[], Any] = lambda: None  # that was looked at last
        self._refused = ""

    def model_loaded(self, model: Any) -> None:
        """Say at once whether this model's requests can speculate."""
        from mlx_lm.models.cache import make_prompt_cache

        self._model = weakref.ref(model)
        self._refused = _refusal(make_prompt_cache(model)) or self._refused_by_source(model) or (self._unpriced(model) if self.tokens == AUTO else "")
        if self._refused:
            logger.warning("speculation %s is not for this model: %s", self.source.name, self._refused)

    def begin(self, model: Any, row: SpeculativeRow) -> Speculator | None:
        if self._model() is not model:
            self.model_loaded(model)  # a script's
        if self._refused or (tokens := self._tokens(row)) == 0:
            return None
        if reason := _refusal(row.caches):
            logger.info("a request decodes without speculation: %s", reason)
            return None
        if tokens == AUTO and (reason := self._unpriced(model)):  # it is one that asks for `auto` itself
            logger.info("a request decodes without speculation: %s", reason)
            return None
        self._tally.requests += 1
        rule = self._rule(row)
        verifier = Stepwise(model, rule) if self._strict else Executor(model, self._tally, rule)
        drafts = self._auto.begin(model) if tokens == AUTO else int(tokens)
        self._chooses = self._chooses or tokens == AUTO
        trace = functools.partial(self._trace.round, self._tally.requests) if self._trace is not None else None
        return Request(self.source.begin(model), verifier, rule.draws, drafts, self._tally, self._statistics, trace)

    def prefilled(self) -> None:
        """A prompt's chunk was prefilled, perhaps between two steps of another request."""
        self._auto.interrupted()

    def _tokens(self, row: SpeculativeRow) -> int | str:
        """How many to draft for a request: what its client says, or the setting."""
        asked = row.draft_tokens
        if asked is None:
            return self.tokens
        if asked == AUTO:
            return 0 if self._strict else AUTO  # none pays
        return min(asked, MOST)

    def _rule(self, row: SpeculativeRow) -> Rule:
        draws = row.draws if self._sampling == "rejection" else ""
        if draws == "unknown":
            self._statistics.fault("rejection_sampling", "a request's sampler does not show from what it draws, so it decides the tokens itself")
        if draws != "random":
            return Target()
        self._tally.rejection_requests += 1
        return Rejection()

    def _refused_by_source(self, model: Any) -> str:
        try:
            return self.source.refuses(model)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _unpriced(self, model: Any) -> str:
        """Have it known what drafting for `model` costs; why it cannot be, empty otherwise."""
        try:
            self._auto.prepare(model, lambda: price(model, self.source))
        except Exception as error:
            return f"measuring what drafts cost failed: {type(error).__name__}: {error}"
        return ""

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        auto = self._auto.report() if self._chooses else None
        report = {"source": self.source.name, "draft_tokens": self.tokens, "strict": self._strict, "sampling": self._sampling, "refused": self._refused or None}
        return {**report, **self._tally.report(), "auto": auto, "draft_model": self.source.report()}


def _refusal(caches: Any) -> str:
    """Why caches cannot verify drafts or be rolled back; empty when they can."""
    try:
        for cache in singles(caches):
            kind_of(cache)
            if getattr(cache, "keep", 0):
                # Past its wrap mlx-lm's mask hides these, not the oldest others, from all but the first token of a chunk.
                return "a ring that keeps its first tokens (--max-kv-size) has no right mask for several tokens"
    except UnknownCacheClass as error:
        return str(error)
    return ""
