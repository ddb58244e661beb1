"""Drafts verified as plain decoding computes: ``--spec-strict``."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_lm_hooks import SpeculativeRow

from .acceptance import Rule
from .executor import Outcome
from .source import Draft


class Stepwise:
    """Implements `Verifier` with a forward for each token, of the shapes that plain decoding has: so its numbers, too, in any precision.

    A step is one token. A wrong draft ends at the token that shows it, so nothing is forwarded that is
    not kept, nothing has to be taken back, and between two steps other sequences may join.
    """

    def __init__(self, model: Any, rule: Rule):
        self._model = model
        self._rule = rule
        self._draft = Draft([])
        self._start = self._calls = 0
        self.open = False

    def begin(self, row: SpeculativeRow, draft: Draft) -> None:
        self._draft, self._start, self._calls, self.open = draft, len(row.tokens), 0, True

    def step(self, row: SpeculativeRow) -> Outcome | None:
        at, self._calls = self._calls, self._calls + 1
        logits = self._model(mx.array([[row.pending]], mx.uint32), cache=row.caches)[:, -1, :]
        following = self._rule.following(row, logits, self._draft.at(at))[0]
        if row.emit() or at == len(self._draft.tokens) or following != self._draft.tokens[at]:
            return self.end()
        return None

    def end(self) -> Outcome:
        self.open = False
        return Outcome(self._start, self._draft.tokens, max(self._calls - 1, 0), self._calls)

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        assert count == 1, "each step emits one token"
