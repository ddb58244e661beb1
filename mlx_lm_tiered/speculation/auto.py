"""How many tokens to draft, from what drafts brought and verifying them took: ``--num-draft-tokens auto``.

Times are counted in steps: one step is what a token takes this request without drafts. With p the share
of drafted tokens that were right, n drafts bring (1 - p^(n+1)) / (1 - p) tokens for the time of one verification.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

# How many tokens are drafted with a model at first, and how many when drafting is tried again.
FIRST, AGAIN = 4, 2
CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
# Plain steps that each request takes before its first draft: they say what a step takes.
MEASURED = 3
# Steps that a request may lose by drafts at first; what it may lose more for each plain step; and the most that it saves or owes.
ALLOWED, SAVED, MOST_SAVED, MOST_OWED = 0.5, 0.01, 4.0, 2.0
# A trial is taken to cost at least that many steps, and at most `MOST_SAVED` until so many verifications were measured: the first may have met a pause.
CHEAPEST, CONVINCED = 0.1, 3
# Guessed of a verification, in steps for each draft, until one was measured.
GUESS = 0.1
# What a draft before counts against the last one; and the first guess: right and wrong drafts.
FADES, RIGHT, WRONG = 0.8, 3.0, 1.0


class Costs:
    """What verifying takes with one model, in steps: running medians by the number of tokens verified, the pending one included.

    The first verification of each order of size is not counted: it may compile kernels.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {1: 1.0}
        self.limit = FIRST  # twice as many drafts as were measured more than once

    def add(self, width: int, steps: float) -> bool:
        """Note a verification of `width` tokens. False when it is not to be counted."""
        size = (width - 1).bit_length()
        if size not in self._seen:
            self._seen.add(size)
            return False
        # Behind what was expected, as one measurement is not believed: there may be a pause in it.
        recent = self._recent.setdefault(width, deque([self.of(width)], maxlen=9))
        recent.append(steps)
        self._medians[width] = _median(recent)
        if len(recent) > 2:
            self.limit = max(self.limit, 2 * (width - 1))
        return True

    def of(self, width: int) -> float:
        """Expected steps: on the line between the next widths that were measured, or on through the last."""
        if width in self._medians:
            return self._medians[width]
        known = sorted(self._medians)
        above = next((w for w in known if w > width), None)
        if above is None and len(known) == 1:
            return 1.0 + GUESS * (width - 1)
        below = max(w for w in known if w < width)
        if above is None:
            slope = max(self._medians[below] - 1.0, 0.0) / (below - 1)
        else:
            slope = (self._medians[above] - self._medians[below]) / (above - below)
        return self._medians[below] + slope * (width - below)

    def trial(self) -> float:
        """What may be lost by the fewest drafts."""
        price = max(self.of(AGAIN + 1) - 1, CHEAPEST)
        return price if len(self._recent.get(AGAIN + 1, ())) > CONVINCED else min(price, MOST_SAVED)

    def report(self) -> list[list[float]]:
        """Pairs of tokens verified and steps."""
        return [[width, round(steps, 3)] for width, steps in sorted(self._medians.items()) if width > 1]


class Auto:
    """Choosers for the requests of a run, and what they share: the costs of the model used last."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._model: Callable[[], Any] = lambda: None
        self.costs = Costs()
        self.pauses = 0  # times that drafting ceased to pay
        self.tokens: int | None = None  # that the request asked last may draft
        self.step: float | None = None  # seconds, in that request
        self.interruptions = 0  # other work between steps, which must not count as a step's time

    def begin(self, model: Any) -> Chooser:
        """The chooser of a new request."""
        if self._model() is not model:
            self._model, self.costs = weakref.ref(model), Costs()
        return Chooser(self, self._clock)

    def interrupted(self) -> None:
        """Something else was done since the last step: another request's prompt was prefilled, say."""
        self.interruptions += 1

    def report(self) -> dict[str, Any]:
        """What `/stats` shows."""
        return {"draft_tokens": self.tokens, "pauses": self.pauses, "step_seconds": self.step, "verification_steps": self.costs.report()}


class Chooser:
    """Chooses for one request.

    It keeps an account, in steps. A round earns its tokens and costs its usual time, a plain step after a lookup or
    a round what it usually takes longer than one; each plain step saves a hundredth. Drafting that is expected to pay needs
    an account that is not below zero, any other has its whole price saved before. So all that is ever lost
    is what was allowed at first, a hundredth of the plain steps, a last round, and what it took to learn the prices.
    """

    def __init__(self, shared: Auto, clock: Callable[[], float]):
        self._shared = shared
        self._costs = shared.costs
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=31)
        self._step: float | None = None
        # How much later than by itself a token comes, in steps: after a round, and after a lookup that found nothing.
        self._late: tuple[deque[float], deque[float]] = (deque(maxlen=5), deque(maxlen=5))
        self._account = ALLOWED
        self._right, self._wrong = RIGHT, WRONG
        self._choice: int | None = None  # what promises most, until something is learnt
        self._entered = self._round = 0.0
        self._known = 0.0  # when the pending token is known where no draft is asked for
        self._length: int | None = None  # of the sequence, as far as the account goes
        self._quiet = 1  # plain steps since the last round or lookup
        self._waited = self._verified = self._beside = False
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
        self._waited = self._verified = self._beside = False
        tokens = self._choose() if self._step is not None else 0
        self._shared.pauses += self._before > 0 == tokens
        self._before = self._shared.tokens = tokens
        return tokens

    def beside(self) -> None:
        """The drafter computes something of its own beside the step that comes: what that takes says nothing."""
        self._beside = True

    def waited(self) -> None:
        """A draft was asked for, and with it the pending token: what follows does not overlap with computing it."""
        self._waited = True
        self._round = self._clock()

    def verified(self, drafted: int, accepted: int) -> None:
        """The step became a round, which is over."""
        assert self._step is not None and self._length is not None
        now, width = self._clock(), drafted + 1
        if self._costs.add(width, (now - self._round) / self._step):
            # By the median: what else took time now, a pause of the machine or a prefill of another request, is not the draft's fault.
            self._pay(1 + accepted - self._costs.of(width))
        self._known, self._length = now, self._length + 1 + accepted
        self._verified, self._quiet = True, 0
        self._right = self._right * FADES + accepted
        self._wrong = self._wrong * FADES + (accepted < drafted)
        self._choice = None

    def _stepped(self, now: float, interrupted: bool) -> None:
        """Account for a plain step; `interrupted` when something else was done in between."""
        if self._beside or interrupted:
            self._quiet = 1
            return
        if self._waited or self._quiet < 2:
            # After a round there may be more to compute than a step: tokens forwarded once more.
            if self._step is not None:
                late = self._late[self._waited]
                late.append((now - self._known) / self._step)
                self._pay(-max(_median([0.0, *late]), 0.0))
        else:
            self._plain.append(now - self._entered)
            if len(self._plain) >= MEASURED:
                self._step = self._shared.step = _median(self._plain)
        self._quiet = 1 if self._waited else self._quiet + 1
        self._pay(SAVED)

    def _pay(self, steps: float) -> None:
        self._account = min(max(self._account + steps, -MOST_OWED), MOST_SAVED)

    def _choose(self) -> int:
        if self._choice is None:
            self._choice = self._best()
        if self._choice:
            return self._choice if self._account >= 0 else 0
        return AGAIN if self._account >= self._costs.trial() else 0

    def _best(self) -> int:
        """The number of drafts that promises most tokens in the time; 0 when none promises more than a step does."""
        right = min(self._right / (self._right + self._wrong), 0.999)
        best, tokens = 1.0, 0
        for choice in CHOICES:
            if choice > self._costs.limit:
                break
            rate = (1 - right ** (choice + 1)) / (1 - right) / self._costs.of(choice + 1)
            if rate > best:
                best, tokens = rate, choice
        return tokens


def _median(values: Sequence[float]) -> float:
    """The lower one of an even number. Without `statistics`, which takes longer to import than all of this."""
    return sorted(values)[(len(values) - 1) // 2]
