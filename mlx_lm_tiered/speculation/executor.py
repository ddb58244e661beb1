"""One round of speculative decoding, whatever the drafts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_lm_hooks import SpeculativeRow

from .rollback import Rollback
from .tally import Tally


class Executor:
    """Verifies drafts in one forward of `model`, with one product by the output matrix for all positions. For one sequence."""

    def __init__(self, model: Any, tally: Tally):
        self._model = model
        self._tally = tally
        self._last: tuple[Rollback, mx.array] | None = None

    def round(self, row: SpeculativeRow, drafts: Sequence[int]) -> int:
        """Emit the row's pending token and the longest prefix of `drafts` that the row would have sampled itself; returns how many drafts that were.

        Afterwards the row's caches hold exactly its tokens, also when it has ended in the middle.
        """
        chunk = mx.array([[row.pending, *drafts]])
        self._last = Rollback(row.caches, 1 + len(drafts)), chunk
        emitted = _accept(row, self._model(chunk, cache=row.caches)[0], drafts)
        self.rewind(row, emitted)
        self._tally.verified(len(drafts), emitted - 1)
        return emitted - 1

    def rewind(self, row: SpeculativeRow, count: int) -> None:
        """Have the caches hold the first `count` tokens of the last round's chunk, at least one, and no more. Nothing was forwarded since."""
        assert self._last is not None
        rollback, chunk = self._last
        if rollback.keep(count):
            self._model(chunk[:, :count], cache=row.caches)
            # Nobody looks at the logits: without this the graph would grow until the next round.
            mx.async_eval([cache.state for cache in row.caches])
            self._tally.replayed()


def _accept(row: SpeculativeRow, logits: mx.array, drafts: Sequence[int]) -> int:
    """Emit tokens while they are the drafts; returns how many, the pending one included. `logits` (1 + drafts, vocabulary).

    The row samples behind each token that it emits and behind no other, in order, as
    it does without speculation: so its processors and sampler, and their random numbers, see the same.
    """
    sampled = row.sample(logits) if row.together else None
    for at in range(len(drafts) + 1):
        following = sampled[at] if sampled is not None else row.sample(logits[at : at + 1])[0]
        if row.emit() or at == len(drafts) or following != drafts[at]:
            return at + 1
    raise AssertionError("the last position always ends the round")
