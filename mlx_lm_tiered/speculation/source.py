"""What a draft source is. A source that drafts nonsense costs time and changes no token: the model decides each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Draft(NamedTuple):
    """Tokens expected behind the pending one, and from what each was drawn.

    `probabilities` (tokens, vocabulary), float32, are what each token was drawn from at
    random, given those before it; None where the drafter drew nothing: its tokens are certain, as
    those that it finds or thinks most likely.
    """

    tokens: list[int]
    probabilities: Any = None

    def first(self, count: int) -> Draft:
        """At most that many of the tokens."""
        return Draft(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])

    def at(self, place: int) -> Draft:
        """The token there; none behind the last."""
        return Draft(self.tokens[place : place + 1], None if self.probabilities is None else self.probabilities[place : place + 1])


NONE = Draft([])


class Price(NamedTuple):
    """What drafting for a model takes, in seconds.

    `step` is a token by plain decoding, `rounds` says what verifying so many tokens takes, the pending one included, `late` is how much
    longer the plain step behind that takes, `draft` is what each draft takes beside, and `behind` each token of the sequence that the drafter has to catch up with.
    """

    step: float
    rounds: Mapping[int, float]
    late: float = 0.0
    draft: float = 0.0
    behind: float = 0.0


class DraftCost(NamedTuple):
    """A source's part of a `Price`: 0 where it has no model to compute."""

    draft: float = 0.0
    behind: float = 0.0


def always(behind: int) -> bool:
    """It is worth catching up with any number of tokens."""
    return True


class Drafter(Protocol):
    """The drafts of one sequence. Generation thread only.

    `computed` is how many tokens the last `hopes` has a model of the drafter's own compute beside the step that comes.
    """

    computed: int

    def hopes(self, tokens: Sequence[int], worth: Callable[[int], bool] = always) -> bool:
        """Whether a draft may come behind `tokens` and one more token, which is still being computed. Asked before each step, so it must be quick.

        `tokens` only grows between calls. A drafter that would have to catch up with so many of them first asks whether that is `worth` it.
        """

    def draft(
        self, tokens: Sequence[int], pending: int, most: int, caches: Sequence[Any], probabilities: Callable[[Any], Any] | None = None
    ) -> Draft:
        """Up to `most` (at least 1) tokens expected behind `tokens` and `pending`; `NONE` when nothing is. `caches` are the model's, which hold `tokens`.

        Where `probabilities` is given, drafts may be drawn at random. It makes of log-probabilities (positions, vocabulary) what
        the request's sampler draws from, with its temperature and all; a draft drawn from that is accepted most often. It must then come with
        its probabilities. Where it is None, a draft has to be certain.
        """

    def verified(self, drafted: int, accepted: int) -> None:
        """What became of the last draft."""

    def end(self) -> None:
        """The sequence has ended or was given up; nothing is asked any more."""


class DraftSource(Protocol):
    """Where drafts come from; one for a run. `tokens` is how many it drafts at a time unless told otherwise."""

    name: str
    tokens: int

    def refuses(self, model: Any) -> str:
        """Why it cannot draft for `model`, in a sentence; empty when it can. It loads what it needs for that. Asked once for a model."""

    def begin(self, model: Any) -> Drafter:
        """The drafter of a new sequence that `model` generates."""

    def price(self, model: Any, step: float) -> DraftCost:
        """What drafting for `model`, which is not refused and takes `step` seconds for a token, costs beside verifying. It measures that by some forwards."""

    def report(self) -> dict[str, Any] | None:
        """What `/stats` shows of the model that drafts; None where there is none. Any thread."""
