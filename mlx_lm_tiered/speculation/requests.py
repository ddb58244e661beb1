"""Speculation of a server's requests: implements the contract's `Speculation` over one draft source."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm_hooks import Speculator, SpeculativeRow

from ..caches import UnknownCacheClass, kind_of
from ..settings import AUTO
from ..statistics import Statistics
from .acceptance import Rejection, Rule, Target
from .auto import Auto, Chooser
from .choose import MOST
from .executor import Executor, Outcome, Verifier
from .rollback import singles
from .source import NONE, Draft, Drafter, DraftSource
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
        self._refused = _refusal(make_prompt_cache(model)) or self._refused_by_source(model)
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
        self._tally.requests += 1
        rule = self._rule(row)
        verifier = Stepwise(model, rule) if self._strict else Executor(model, self._tally, rule)
        drafts = self._auto.begin(model) if tokens == AUTO else int(tokens)
        self._chooses = self._chooses or tokens == AUTO
        trace = functools.partial(self._trace.round, self._tally.requests) if self._trace is not None else None
        return _Request(self.source.begin(model), verifier, rule.draws, drafts, self._tally, self._statistics, trace)

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

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        auto = self._auto.report() if self._chooses else None
        report = {"source": self.source.name, "draft_tokens": self.tokens, "strict": self._strict, "sampling": self._sampling, "refused": self._refused or None}
        return {**report, **self._tally.report(), "auto": auto, "draft_model": self.source.report()}


class _Request:
    """Implements `Speculator`."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        draws: bool,
        tokens: int | Chooser,
        tally: Tally,
        statistics: Statistics,
        trace: Callable[[int, list[int], int, Sequence[int]], None] | None,
    ):
        self._drafter: Drafter | None = drafter
        self._verifier = verifier
        self._draws = draws  # whether drafts may be drawn at random
        self._tokens, self._chooser = (0, tokens) if isinstance(tokens, Chooser) else (tokens, None)
        self._tally = tally
        self._statistics = statistics
        self._trace = trace
        self._ended = False
        self._length = 0  # of the sequence, after the last step
        self._calls = self._drafted = self._accepted = 0

    def advance(self, row: SpeculativeRow) -> bool:
        if self._verifier.open and len(row.tokens) != self._length:
            self._decided(row, self._verifier.end())  # others have decoded with it
        if not self._verifier.open:
            draft = self._draft(row)
            if not draft.tokens:
                return False
            self._verifier.begin(row, draft)
        outcome = self._verifier.step(row)
        self._length = len(row.tokens)
        if outcome is not None:
            self._decided(row, outcome)
        return True

    def _draft(self, row: SpeculativeRow) -> Draft:
        if self._drafter is None:
            return NONE
        most = min(self._tokens if self._chooser is None else self._chooser.allowed(len(row.tokens)), row.room)
        if most < 1:
            return NONE
        try:
            hopes = self._drafter.hopes(row.tokens)
            if self._chooser is not None and self._drafter.computed:
                self._chooser.beside()
            return self._drafted_by(self._drafter, row, most).first(most) if hopes else NONE
        except Exception as error:
            # Nothing was forwarded yet: the request goes on without drafts.
            self._drafter = None
            self._statistics.fault("drafting", f"drafting failed: {type(error).__name__}: {error}; the request decodes plainly")
            return NONE

    def _decided(self, row: SpeculativeRow, outcome: Outcome) -> None:
        """Count what became of a draft, and tell who made it."""
        drafted, accepted = len(outcome.drafted), outcome.accepted
        self._tally.verified(drafted, accepted, outcome.calls)
        self._calls, self._drafted, self._accepted = self._calls + outcome.calls, self._drafted + drafted, self._accepted + accepted
        if self._trace is not None:
            self._trace(outcome.position, outcome.drafted, accepted, row.tokens[outcome.position :][: accepted + 1])
        if self._drafter is not None:
            self._drafter.verified(drafted, accepted)
        if self._chooser is not None:
            self._chooser.verified(drafted, accepted)

    def _drafted_by(self, drafter: Drafter, row: SpeculativeRow, most: int) -> Draft:
        pending = row.pending  # waits
        if self._chooser is not None:
            self._chooser.waited()
        return drafter.draft(row.tokens, pending, most, row.caches, row.probabilities if self._draws else None)

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        self._verifier.rewind(row, count)

    def usage(self) -> dict[str, int]:
        return {"drafted_tokens": self._drafted, "accepted_tokens": self._accepted, "target_calls": self._calls}

    def end(self) -> None:
        if not self._ended and self._calls:
            share = self._accepted / self._drafted
            logger.info("drafted %d tokens, %d of them right (%.0f %%), in %d forwards", self._drafted, self._accepted, 100 * share, self._calls)
        self._ended = True
        drafter, self._drafter = self._drafter, None
        try:
            if drafter is not None:
                drafter.end()
        except Exception as error:
            self._statistics.fault("drafting", f"ending a request's drafts failed: {type(error).__name__}: {error}")


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
