"""What speculation did, for `/stats`."""

from __future__ import annotations

from typing import Any


class Tally:
    """Counters of one run. Written on the generation thread, read anywhere."""

    def __init__(self) -> None:
        self.requests = 0
        self.rejection_requests = 0
        self.target_calls = 0
        self.replays = 0
        self._drafts = 0
        self._drafted: list[int] = []  # by position in the draft
        self._accepted: list[int] = []

    def verified(self, drafted: int, accepted: int, calls: int = 1) -> None:
        """A draft of `drafted` tokens was verified in `calls` forwards, and the first `accepted` were right."""
        self.target_calls += calls
        self._drafts += 1
        while len(self._drafted) < drafted:
            self._accepted.append(0)
            self._drafted.append(0)
        for place in range(drafted):
            self._drafted[place] += 1
            self._accepted[place] += place < accepted

    def replayed(self) -> None:
        """Accepted tokens went through the model a second time."""
        self.replays += 1

    def report(self) -> dict[str, Any]:
        """All counters, JSON-able. Rates are null where nothing was drafted."""
        drafted, accepted = list(self._drafted), list(self._accepted)
        drafts = self._drafts
        return {
            "requests": self.requests,
            "rejection_requests": self.rejection_requests,
            "target_calls": self.target_calls,
            "replays": self.replays,
            "drafts": drafts,
            "drafted": sum(drafted),
            "accepted": sum(accepted),
            "acceptance": sum(accepted) / sum(drafted) if drafted else None,
            "accepted_by_position": accepted,
            "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=False)],
            "mean_accepted": sum(accepted) / drafts if drafts else None,
        }
