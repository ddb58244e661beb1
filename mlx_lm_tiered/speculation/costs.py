"""What drafting and verifying take with one model, in steps, and how often its drafts are right: what ``auto`` goes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .source import Price

# How many tokens are drafted with a model at first, and how many when drafting is tried again.
FIRST, AGAIN = 4, 2
# The most steps that a request saves up for trials.
MOST_SAVED = 4.0
# A trial is taken to cost at least that many steps, and at most `MOST_SAVED` until a verification has confirmed what was measured beforehand: that may have met a pause.
CHEAPEST = 0.1
# The first guess of right and wrong drafts.
RIGHT, WRONG = 3.0, 1.0
# Of a draft model, from request to request: what a draft before counts against the last one, and between what shares of right ones a request begins.
REMEMBERED, LEAST, MOST = 0.95, 0.05, 0.95
# So many drafts say how often they are right.
PROVEN = 8


class Costs:
    """What verifying takes with one model, in steps: running medians by the number of tokens verified, the pending one included.

    They begin with a `Price`. The first verification of an order of size that has none is not counted: it may compile kernels. `draft` and `behind` are what a draft takes beside
    that, and each token that the drafter has to catch up with; 0 where it has no model to compute. `late` is how much longer than others the plain step behind a round takes.
    """

    def __init__(self, price: Price) -> None:
        self.draft, self.behind, self.late = price.draft / price.step, price.behind / price.step, price.late / price.step
        self.odds: tuple[float, float] | None = (RIGHT, WRONG) if price.draft else None  # drafts that were right, and wrong
        self._judged = 0
        self._caught: deque[float] = deque([self.behind], maxlen=5)
        self._seen = {_size(width) for width in price.rounds}
        self._recent: dict[int, deque[float]] = {}
        self._before = {width: seconds / price.step + self.draft * (width - 1) for width, seconds in price.rounds.items()}
        self._medians = {1: 1.0} | self._before
        self.limit = FIRST  # twice as many drafts as were measured more than once

    def add(self, width: int, steps: float) -> bool:
        """Note a verification of `width` tokens. False when it is not to be counted."""
        if (size := _size(width)) not in self._seen:
            self._seen.add(size)
            return False
        # Behind what was expected, as one measurement is not believed: there may be a pause in it.
        recent = self._recent.setdefault(width, deque([self.of(width)], maxlen=9))
        recent.append(steps)
        self._medians[width] = median(recent)
        if width in self._before:
            # What made this one another than it was beforehand, a long context or a pause then, holds for the others, too.
            scale = self._medians[width] / self._before[width]
            self._medians |= {other: scale * steps for other, steps in self._before.items() if other not in self._recent}
        if len(recent) > 2:
            self.limit = max(self.limit, 2 * (width - 1))
        return True

    def of(self, width: int) -> float:
        """Expected steps: on the line between the next widths that were measured, or on through the last."""
        if width in self._medians:
            return self._medians[width]
        known = sorted(self._medians)
        above = next((w for w in known if w > width), None)
        below = max(w for w in known if w < width)
        if above is None:
            slope = max(self._medians[below] - 1.0, 0.0) / (below - 1)
        else:
            slope = (self._medians[above] - self._medians[below]) / (above - below)
        return self._medians[below] + slope * (width - below)

    def trial(self) -> float:
        """What may be lost by the fewest drafts."""
        price = max(self.most_lost(AGAIN), CHEAPEST)
        return price if AGAIN + 1 in self._recent else min(price, MOST_SAVED)

    def most_lost(self, tokens: int) -> float:
        """What a round loses of which no draft is right, and the step behind it."""
        return self.of(tokens + 1) - 1 + self.late

    def caught_up(self, tokens: int, steps: float) -> None:
        """Note what it took to catch up with so many tokens."""
        self._caught.append(max(steps, 0.0) / tokens)
        self.behind = median(self._caught)

    def judged(self, accepted: int, drafted: int) -> None:
        """Note what became of a draft."""
        self._judged += 1
        if self.odds is not None:
            right, wrong = self.odds
            self.odds = right * REMEMBERED + accepted, wrong * REMEMBERED + (accepted < drafted)

    @property
    def proven(self) -> bool:
        """Whether so many drafts were judged that it is known how often they are right."""
        return self._judged >= PROVEN

    def expected(self) -> tuple[float, float]:
        """Right and wrong drafts that a request begins with, as many as were there to be guessed."""
        if self.odds is None:
            return RIGHT, WRONG
        share = min(max(self.odds[0] / sum(self.odds), LEAST), MOST)
        return share * (RIGHT + WRONG), (1 - share) * (RIGHT + WRONG)

    def report(self) -> dict[str, Any]:
        """What `/stats` shows: pairs of tokens verified and steps, and what drafts and catching up take."""
        rounds = [[width, round(steps, 3)] for width, steps in sorted(self._medians.items()) if width > 1]
        return {"verification_steps": rounds, "late_steps": round(self.late, 3), "draft_steps": round(self.draft, 4), "catch_up_steps": round(self.behind, 4)}


# What is reported before there are any.
NO_COSTS: dict[str, Any] = {"verification_steps": [], "late_steps": 0.0, "draft_steps": 0.0, "catch_up_steps": 0.0}


def _size(width: int) -> int:
    """The order of size of a verification: such ones share kernels."""
    return (width - 1).bit_length()


def median(values: Sequence[float]) -> float:
    """The lower one of an even number. Without `statistics`, which takes longer to import than all of this."""
    return sorted(values)[(len(values) - 1) // 2]
