"""Restore, restore part of what could be had, or compute: whichever is expected to have the prompt ready first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..cold.catalog import ColdEntry
from .rates import Rates

MODES = ("auto", "always", "never")
# Computing must be expected to take less than this share of restoring: predictions are rough, and a choice that flips helps no one.
CLEARLY = 0.9
WORTH = 0.05  # seconds that computing must be expected to save besides: below, noise is all there is
# A restore's prediction halves in so many seconds without one that was measured, is a
# third after twice the time, and so on: so a figure from a bad moment is tried again,
# the later the worse it was.
FADING = 3600.0

Action = Literal["restored", "partly", "recomputed"]


@dataclass(frozen=True)
class Candidate:
    """A stored prefix that can be had: `length` tokens, for `size` bytes read."""

    entry: ColdEntry
    length: int
    size: int


@dataclass(frozen=True)
class Decision:
    """What was chosen. `restore_s` and `compute_s` are what the prompt was expected to take with the best restore and without one; None: not measured yet."""

    action: Action
    chosen: Candidate | None
    offered: int  # tokens that could have been restored
    restore_s: float | None = None
    compute_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "tokens": self.chosen.length if self.chosen is not None else 0,
            "offered_tokens": self.offered,
            "restore_ms": _milliseconds(self.restore_s),
            "compute_ms": _milliseconds(self.compute_s),
        }

    def __str__(self) -> str:
        if self.restore_s is None or self.compute_s is None:
            return f"{self.offered} tokens on SSD, {self.action}: not measured yet"
        return f"{self.offered} tokens on SSD, {self.action}: {1000 * self.restore_s:.0f} ms expected with a restore, {1000 * self.compute_s:.0f} ms without"


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)


class Chooser:
    """Decides by measured rates (`auto`), or does not (`always`). Thread-safe."""

    def __init__(self, rates: Rates, mode: str = "auto"):
        if mode not in MODES:
            raise ValueError(f"the mode must be one of {', '.join(MODES)}, not {mode!r}")
        self.rates = rates
        self.mode = mode
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: Decision | None = None

    def decide(self, fingerprint: str, candidates: Sequence[Candidate], have: int, total: int) -> Decision:
        """What to do for `total` tokens of which memory has the first `have`; the longest candidate comes first."""
        longest = candidates[0]
        compute = self.rates.prefill_seconds(fingerprint, have, total)
        timed = [(self._with(fingerprint, candidate, total), candidate) for candidate in candidates]
        known = [(seconds, candidate) for seconds, candidate in timed if seconds is not None]
        if compute is None or not known:
            return Decision("restored", longest, longest.length)
        seconds, best = min(known, key=lambda pair: pair[0])
        if self.mode == "always":
            return Decision("restored", longest, longest.length, known[0][0], compute)
        faded = seconds / (1 + self.rates.restore_age(fingerprint) / FADING)
        if compute < CLEARLY * faded and faded - compute > WORTH:
            return Decision("recomputed", None, longest.length, seconds, compute)
        # Less than all is no better unless it is clearly so.
        if best is not longest and seconds < CLEARLY * known[0][0]:
            return Decision("partly", best, longest.length, seconds, compute)
        return Decision("restored", longest, longest.length, known[0][0], compute)

    def _with(self, fingerprint: str, candidate: Candidate, total: int) -> float | None:
        read = self.rates.restore_seconds(fingerprint, candidate.size)
        rest = self.rates.prefill_seconds(fingerprint, candidate.length, total)
        return None if read is None or rest is None else read + rest

    def followed(self, decision: Decision) -> None:
        """Count a decision that a request was served by."""
        with self._lock:
            self._counts[decision.action] += 1
            self._last = decision

    def stats(self) -> dict[str, Any]:
        """The counters, the last decision, the rates."""
        with self._lock:
            return {
                "restore": self.mode,
                "decisions": {
                    **{action: self._counts[action] for action in ("restored", "partly", "recomputed")},
                    "last": self._last.as_json() if self._last is not None else None,
                },
                "rates": self.rates.report(),
            }


def candidates(entry: ColdEntry, length: int, usable: Any) -> list[Candidate]:
    """What can be restored of `entry`, which serves `length` tokens: itself, then each that it continues, longest first.

    `usable(entry, common)` says how many of the `common` first tokens an entry can serve.
    """
    found = [Candidate(entry, length, sum(one.nbytes for one in entry.chain))]
    common = length
    while entry.parent is not None:
        common = min(common, entry.start)
        entry = entry.parent
        if (served := usable(entry, common)) > 0:
            found.append(Candidate(entry, served, sum(one.nbytes for one in entry.chain)))
    return found
