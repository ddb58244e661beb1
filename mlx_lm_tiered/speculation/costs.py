"""What drafting and verifying take with one model, in steps, and how often its drafts are right: what ``auto`` goes by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .source import Price

# How many tokens are drafted with a model at first, and how many when drafting is tried again.
FIRST, AGAIN = 4, 2
# The most steps that a request saves up for trials.
MOST_SAVED = 4.0
# A trial is taken to cost at least that many steps, and at most `MOST_SAVED` until so many verifications were measured: the first may have met a pause.
CHEAPEST, CONVINCED = 0.1, 3
# Guessed of a verification, in steps for each draft, until one was measured; that it takes to draft it is known.
GUESS = 0.1
# The first guess of right and wrong drafts.
RIGHT, WRONG = 3.0, 1.0
# Of a draft model, from request to request: what a draft before counts against the last one, and between what shares of right ones a request begins.
REMEMBERED, LEAST, MOST = 0.95, 0.05, 0.95
# So many drafts say how often they are right.
PROVEN = 8


class Costs:
    """What verifying takes with one model, in steps: running medians by the number of tokens verified, the pending one included.

    The first verification of each order of size is not counted: it may compile kernels. `draft` and `behind` are what a draft takes beside
    that, and each token that the drafter has to catch up with; 0 where it has no model to compute.
    """

    def __init__(self, price: Price | None = None) -> None:
        self.draft, self.behind = (price.draft / price.step, price.behind / price.step) if price is not None else (0.0, 0.0)
        self.odds: tuple[float, float] | None = (RIGHT, WRONG) if price is not None else None  # drafts that were right, and wrong
        self._judged = 0
        self._caught: deque[float] = deque([self.behind], maxlen=5)
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
        self._medians[width] = median(recent)
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
            return 1.0 + (GUESS + self.draft) * (width - 1)
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

    def report(self) -> list[list[float]]:
        """Pairs of tokens verified and steps."""
        return [[width, round(steps, 3)] for width, steps in sorted(self._medians.items()) if width > 1]


def median(values: Sequence[float]) -> float:
    """The lower one of an even number. Without `statistics`, which takes longer to import than all of this."""
    return sorted(values)[(len(values) - 1) // 2]
