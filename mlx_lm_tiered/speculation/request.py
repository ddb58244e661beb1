"""The speculation of one request."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from mlx_lm_hooks import SpeculativeRow

from ..statistics import Statistics
from .auto import Chooser
from .executor import Outcome, Verifier
from .source import NONE, Draft, Drafter, always
from .tally import Tally

logger = logging.getLogger("mlx_lm_tiered")


class Request:
    """Implements `Speculator`: asks the drafter, has the drafts verified, counts."""

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
        self._chooser = tokens if isinstance(tokens, Chooser) else None
        self._tokens = 0 if isinstance(tokens, Chooser) else tokens
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
            worth = always if self._chooser is None else functools.partial(self._chooser.worth, room=row.room)
            hopes = self._drafter.hopes(row.tokens, worth)
            if self._chooser is not None and self._drafter.computed:
                self._chooser.beside(self._drafter.computed)
            return self._drafted_by(self._drafter, row, most).first(most) if hopes else NONE
        except Exception as error:
            self._failed("drafting", error)  # nothing was forwarded yet
            return NONE

    def _decided(self, row: SpeculativeRow, outcome: Outcome) -> None:
        """Count what became of a draft, and tell who made it."""
        drafted, accepted = len(outcome.drafted), outcome.accepted
        self._tally.verified(drafted, accepted, outcome.calls)
        self._calls, self._drafted, self._accepted = self._calls + outcome.calls, self._drafted + drafted, self._accepted + accepted
        if self._trace is not None:
            self._trace(outcome.position, outcome.drafted, accepted, row.tokens[outcome.position :][: accepted + 1])
        try:
            if self._drafter is not None:
                self._drafter.verified(drafted, accepted)
        except Exception as error:
            self._failed("learning what became of a draft", error)
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
        self._let_go()

    def _failed(self, what: str, error: Exception) -> None:
        """The request goes on without drafts."""
        self._statistics.fault("drafting", f"{what} failed: {type(error).__name__}: {error}; the request decodes plainly")
        self._let_go()

    def _let_go(self) -> None:
        drafter, self._drafter = self._drafter, None
        try:
            if drafter is not None:
                drafter.end()
        except Exception as error:
            self._statistics.fault("drafting", f"ending a request's drafts failed: {type(error).__name__}: {error}")
