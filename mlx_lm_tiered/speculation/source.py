"""What a draft source is. A source that drafts nonsense costs time and changes no token: the model decides each one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Drafter(Protocol):
    """The drafts of one sequence. Generation thread only."""

    def hopes(self, tokens: Sequence[int]) -> bool:
        """Whether a draft may come behind `tokens` and one more token, which is still being computed. Asked before each step, so it must be quick.

        `tokens` only grows between calls.
        """

    def draft(self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any]) -> list[int]:
        """Up to `most` (at least 1) tokens expected behind `tokens` and `pending`; none when nothing is. `caches` are the model's, which hold `tokens`."""

    def verified(self, drafted: int, accepted: int) -> None:
        """What became of the last draft."""


class DraftSource(Protocol):
    """Where drafts come from; one for a run. `tokens` is how many it drafts at a time unless told otherwise."""

    name: str
    tokens: int

    def begin(self, model: Any) -> Drafter:
        """The drafter of a new sequence that `model` generates."""
