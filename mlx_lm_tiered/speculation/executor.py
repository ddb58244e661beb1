"""One round of speculative decoding, whatever the drafts come from: the draft verified in one forward of the model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_lm_hooks import SpeculativeRow

from .acceptance import Rule
from .rollback import Rollback
from .source import Draft
from .tally import Tally


class Outcome(NamedTuple):
    """What became of a draft: the length of the sequence when it was made, its tokens, how many were accepted, in how many forwards."""

    position: int
    drafted: list[int]
    accepted: int
    calls: int


class Verifier(Protocol):
    """Verifies the drafts of one sequence."""

    open: bool  # whether the last draft is not yet decided

    def begin(self, row: SpeculativeRow, draft: Draft) -> None:
        """Take a draft of at least one token, behind the row's pending one."""

    def step(self, row: SpeculativeRow) -> Outcome | None:
        """Emit the pending token and as many of the draft as this step decides; None while more is to be decided.

        Afterwards the row's caches hold exactly its tokens, also when it has ended in the middle.
        """

    def end(self) -> Outcome:
        """Let go of a draft that is not decided; nothing has to be taken back."""

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        """Have the caches hold the first `count` tokens that the last step emitted, at least one, and no more. Nothing was forwarded since."""


class Executor:
    """Implements `Verifier` with one forward of `model` for a draft, and one product by the output matrix for all positions."""

    open = False

    def __init__(self, model: Any, tally: Tally, rule: Rule):
        self._model = model
        self._tally = tally
        self._rule = rule
        self._draft = Draft([])
        self._last: tuple[Rollback, mx.array] | None = None

    def begin(self, row: SpeculativeRow, draft: Draft) -> None:
        self._draft = draft

    def step(self, row: SpeculativeRow) -> Outcome:
        draft, position = self._draft, len(row.tokens)
        chunk = mx.array([[row.pending, *draft.tokens]])
        self._last = Rollback(row.caches, 1 + len(draft.tokens)), chunk
        emitted = self._accept(row, self._model(chunk, cache=row.caches)[0], draft)
        self.rewind(row, emitted)
        return Outcome(position, draft.tokens, emitted - 1, 1)

    def end(self) -> Outcome:
        raise AssertionError("each step decides its draft")

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        assert self._last is not None
        rollback, chunk = self._last
        if rollback.keep(count):
            self._model(chunk[:, :count], cache=row.caches)
            # Nobody looks at the logits: without this the graph would grow until the next round.
            mx.async_eval([cache.state for cache in row.caches])
            self._tally.replayed()

    def _accept(self, row: SpeculativeRow, logits: mx.array, draft: Draft) -> int:
        """Emit tokens while they are the drafts; returns how many, the pending one included. `logits` (1 + drafts, vocabulary).

        The row samples behind each token that it emits and behind no other, in order, as
        it does without speculation: so its processors and sampler, and their random numbers, see the same.
        """
        sampled = self._rule.following(row, logits, draft) if self._rule.together(row) else None
        for at in range(len(draft.tokens) + 1):
            one = sampled[at] if sampled is not None else self._rule.following(row, logits[at : at + 1], draft.at(at))[0]
            if row.emit() or at == len(draft.tokens) or one != draft.tokens[at]:
                return at + 1
        raise AssertionError("the last position always ends the round")
