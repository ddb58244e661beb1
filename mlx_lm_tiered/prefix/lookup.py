"""What became of a request's lookup: how much was reused, from where, and why not more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..index.keys import WIDTH, key_tokens

if TYPE_CHECKING:
    from .choice import Decision

LABELS = {"ram": "RAM", "queue": "the queue", "ssd": "SSD", "shared": "the shared store"}
AROUND = 12  # tokens before and behind the place where two sequences part


class Nearest(NamedTuple):
    """A stored sequence of `length` tokens that shares `common` leading ones with a prompt; `key` makes its key."""

    common: int
    length: int
    tier: str
    key: Callable[[], bytes]

    @property
    def where(self) -> str:
        return f"the closest stored sequence ({self.length} tokens, {'queue' if self.tier == 'queue' else LABELS[self.tier]})"


class Parting(NamedTuple):
    """Tokens around the place where a prompt leaves a stored sequence: those before it, and how either goes on; `model` is the directory of the model whose they are."""

    model: Path | None
    before: list[int]
    prompt: list[int]
    stored: list[int]


@dataclass(frozen=True)
class Lookup:
    """One request's. `why` says why not more was reused, empty when there was no more; `tier` is empty for a miss.

    `restore_seconds` is what reading from disk took, `saved_seconds` what computing
    the reused tokens would have, as far as that was measured. `nearest` is (tokens
    shared, length, tier) of the stored sequence that shares most.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    tier: str = ""
    decision: Decision | None = None
    why: str = ""
    nearest: tuple[int, int, str] | None = None
    restore_seconds: float | None = None
    saved_seconds: float | None = None
    parting: Parting | None = None

    def __str__(self) -> str:
        text = f"reused {self.reused_tokens} of {self.prompt_tokens} prompt tokens" + (f" from {LABELS[self.tier]}" if self.tier else "")
        if self.restore_seconds is not None:
            text += f" in {1000 * self.restore_seconds:.0f} ms"
        if self.decision is not None:
            text += f"; {self.decision}"
        return text + (f"; {self.why}" if self.why else "")


def why_not_more(nearest: Nearest | None, prompt: int, min_tokens: int) -> str:
    """Why the stored sequence that shares most with a prompt of so many tokens served no more of it."""
    if nearest is None:
        return "nothing stored for this model begins like it"
    if nearest.common < min_tokens:
        return f"{nearest.where} shares {nearest.common} tokens, fewer than are reused"
    if nearest.common < min(nearest.length, prompt):
        return f"{nearest.where} diverges at token {nearest.common}"
    if nearest.common == nearest.length:
        return f"{nearest.where} ends there"
    return f"{nearest.where} can only be reused whole"


def parting(model: Path | None, nearest: Nearest, tokens: Sequence[int]) -> Parting | None:
    """The tokens around the place where the two part; None where one is the beginning of the other."""
    at = nearest.common
    if at >= min(nearest.length, len(tokens)):
        return None
    stored = nearest.key()[at * WIDTH : (at + AROUND) * WIDTH]
    return Parting(model, list(tokens[max(0, at - AROUND) : at]), list(tokens[at : at + AROUND]), key_tokens(stored))
