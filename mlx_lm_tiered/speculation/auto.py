"""How many tokens to draft, from what drafts brought and verifying them took: ``--num-draft-tokens auto``.

Times are counted in steps: one step is what a token takes this request without drafts. With p the share
of drafted tokens that were right, n drafts bring (1 - p^(n+1)) / (1 - p) tokens for the time of one verification,
the drafting included.

Rounds and drafts have a price before the first one is made (see `pricing`). A draft model costs more than a lookup, and it has to
catch up with a prompt before it drafts at all: so how often its drafts are right is remembered from request to request, and it
catches up where that is paid back by what is left to generate.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .costs import AGAIN, MOST_SAVED, NO_COSTS, Costs, median
from .source import Price

CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
# Plain steps that each request takes before its first draft: they say what a step takes.
MEASURED = 3
# Steps that a request may lose by drafts at first; what it may lose more for each plain step; and the most that it owes.
ALLOWED, SAVED, MOST_OWED = 0.5, 0.01, 2.0
# Steps that a round may lose beyond what was saved, where it is expected to pay; until so many of a request's drafts were right.
ADVANCED, TRUSTED = 0.5, 4
# Of what a request has saved the next one has that much at most.
CARRIED = 2.0
# Catching up has to be paid back by so much of the tokens that a request may still generate, of at most so many: few generate all.
SHARE, FURTHEST = 0.5, 512
# Where it is not known that drafts pay, for so much of them, or for what all requests have saved: a hundredth of each plain step, at most so many steps.
TRIED, MOST_POOLED = 0.02, 64.0
# What a draft before counts against the last one.
FADES = 0.8


class Auto:
    """Choosers for the requests of a run, and what they share: the costs of the model used last."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._model: Callable[[], Any] = lambda: None
        self.costs: Costs | None = None
        self.pauses = 0  # times that drafting ceased to pay
        self.tokens: int | None = None  # that the request asked last may draft
        self.step: float | None = None  # seconds, in that request
        self.pooled = 0.0  # steps saved for catching up
        self.saved = 0.0  # in the account of the request that was paid for last
        self.interruptions = 0  # other work between steps, which must not count as a step's time

    def prepare(self, model: Any, price: Callable[[], Price]) -> None:
        """Have the prices of drafting for this model; `price` is asked where it is another one than before."""
        if self.costs is None or self._model() is not model:
            self.costs, self.saved = None, 0.0
            self.costs = Costs(price())
            self._model = weakref.ref(model)

    def begin(self, model: Any) -> Chooser:
        """The chooser of a new request, for a model that was prepared."""
        assert self.costs is not None and self._model() is model
        return Chooser(self, self.costs, self._clock)

    def interrupted(self) -> None:
        """Something else was done since the last step: another request's prompt was prefilled, say."""
        self.interruptions += 1

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        costs = self.costs.report() if self.costs is not None else NO_COSTS
        return {"draft_tokens": self.tokens, "pauses": self.pauses, "step_seconds": self.step, **costs}


class Chooser:
    """Chooses for one request.

    It keeps an account, in steps. A round earns its tokens and costs its usual time, a plain step after a lookup or
    a round what it usually takes longer than one; each plain step saves a hundredth, which the next request still has. Drafting that is expected to pay needs
    an account that is not below zero, and until some drafts were right one that covers, but for half a step, what a round without a right one loses; any other has its whole price saved before. So all that is ever lost
    is what was allowed at first, a hundredth of the plain steps, half a step, and what it took to correct the prices.
    """

    def __init__(self, shared: Auto, costs: Costs, clock: Callable[[], float]):
        self._shared = shared
        self._costs = costs
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=31)
        self._step: float | None = None
        # How much later than by itself a token comes, in steps: after a round, and after a lookup that found nothing.
        self._late: tuple[deque[float], deque[float]] = (deque([costs.late], maxlen=5), deque([costs.late], maxlen=5))
        self._account = max(ALLOWED, min(shared.saved, CARRIED))
        self._accepted = 0  # drafts that were right
        self._right, self._wrong = self._costs.expected()
        self._choice: int | None = None  # what promises most, until something is learnt
        self._rate = 1.0  # tokens a step that it promises
        self._entered = self._round = 0.0
        self._known = 0.0  # when the pending token is known where no draft is asked for
        self._length: int | None = None  # of the sequence, as far as the account goes
        self._quiet = 1  # plain steps since the last round or lookup
        self._waited = self._verified = False
        self._beside = 0  # tokens that the drafter computes beside the step
        self._catching = (0, 0.0)  # such tokens, and the seconds that steps took longer since the first of them
        self._trying = False  # whether it catches up for a trial
        self._before = 0
        self._interruptions = shared.interruptions

    def allowed(self, length: int) -> int:
        """How many tokens may be drafted now, with `length` tokens in the sequence. To be asked before each step."""
        now = self._clock()
        if not self._verified:
            # The host has taken a step since: the next token is being computed, and known a step from now.
            if length - 1 == self._length:
                self._stepped(now, self._interruptions != self._shared.interruptions)
            self._known = now + (self._step or 0.0)
        elif length != self._length:
            self._known = now + (self._step or 0.0)  # others decoded with it
        self._entered, self._length, self._interruptions = now, length, self._shared.interruptions
        self._waited = self._verified = False
        self._beside = 0
        tokens = self._choose() if self._step is not None else 0
        self._shared.pauses += self._before > 0 == tokens
        self._before = self._shared.tokens = tokens
        return tokens

    def worth(self, behind: int, room: int) -> bool:
        """Whether the drafter should catch up with so many tokens where as many as `room` may still be generated. For what was allowed last."""
        price, room = behind * self._costs.behind, min(room, FURTHEST)
        self._trying, pooled = not (self._choice and self._costs.proven), self._shared.pooled
        most = SHARE * room * (1 - 1 / self._rate) if self._choice else min(TRIED * room, pooled)
        worth = price <= (min(most, max(TRIED * room, pooled)) if self._trying else most)
        if not worth:
            self._before = self._shared.tokens = 0
        return worth

    def beside(self, tokens: int) -> None:
        """The drafter computes so many tokens of its own beside the step that comes, which takes as much longer."""
        self._beside = tokens

    def waited(self) -> None:
        """A draft was asked for, and with it the pending token: what follows does not overlap with computing it."""
        self._waited = True
        self._round = self._clock()
        self._caught_up(self._round)

    def verified(self, drafted: int, accepted: int) -> None:
        """The step became a round, which is over."""
        assert self._step is not None and self._length is not None
        now, width = self._clock(), drafted + 1
        if self._costs.add(width, (now - self._round) / self._step):
            # By the median: what else took time now, a pause of the machine or a prefill of another request, is not the draft's fault.
            self._pay(1 + accepted - self._costs.of(width))
        self._known, self._length = now, self._length + 1 + accepted
        self._verified, self._quiet = True, 0
        self._accepted += accepted
        self._right = self._right * FADES + accepted
        self._wrong = self._wrong * FADES + (accepted < drafted)
        self._costs.judged(accepted, drafted)
        self._choice = None

    def _stepped(self, now: float, interrupted: bool) -> None:
        """Account for a plain step; `interrupted` when something else was done in between."""
        if interrupted:
            self._quiet, self._catching = 1, (0, 0.0)
            return
        if self._beside or self._catching[0]:
            self._quiet = 1
            self._caught_up(now)
            return
        if self._waited or self._quiet < 2:
            # After a round there may be more to compute than a step: tokens forwarded once more.
            if self._step is not None:
                late = self._late[self._waited]
                late.append((now - self._known) / self._step)
                self._pay(-max(median(late), 0.0))
        else:
            self._plain.append(now - self._entered)
            if len(self._plain) >= MEASURED:
                self._step = self._shared.step = median(self._plain)
        self._quiet = 1 if self._waited else self._quiet + 1
        self._pay(SAVED)
        self._shared.pooled = min(self._shared.pooled + SAVED, MOST_POOLED)

    def _caught_up(self, now: float) -> None:
        """Account for a step beside which the drafter caught up, or for the one behind, which waited for that."""
        tokens, seconds = self._catching
        if not (tokens or self._beside):
            return
        assert self._step is not None
        self._catching = tokens + self._beside, seconds + now - self._entered - self._step
        if not self._beside:
            steps = self._catching[1] / self._step
            self._costs.caught_up(tokens, steps)
            if self._trying:
                self._shared.pooled = max(self._shared.pooled - steps, 0.0)
            self._catching = 0, 0.0

    def _pay(self, steps: float) -> None:
        self._account = self._shared.saved = min(max(self._account + steps, -MOST_OWED), MOST_SAVED)

    def _choose(self) -> int:
        if self._choice is None:
            self._choice = self._best()
        if not self._choice:
            return AGAIN if self._account >= self._costs.trial() else 0
        if self._account < 0:
            return 0
        if self._accepted >= TRUSTED:
            return self._choice
        # Fewer lose less.
        return next((tokens for tokens in reversed(CHOICES) if tokens <= self._choice and self._costs.most_lost(tokens) <= self._account + ADVANCED), 0)

    def _best(self) -> int:
        """The number of drafts that promises most tokens in the time; 0 when none promises more than a step does."""
        right = min(self._right / (self._right + self._wrong), 0.999)
        self._rate, tokens = 1.0, 0
        for choice in CHOICES:
            if choice > self._costs.limit:
                break
            rate = (1 - right ** (choice + 1)) / (1 - right) / self._costs.of(choice + 1)
            if rate > self._rate:
                self._rate, tokens = rate, choice
        return tokens
