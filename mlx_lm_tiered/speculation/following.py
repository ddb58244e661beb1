"""A draft model's own caches of a sequence: they follow it, go ahead with a draft, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..caches import Kind, kind_of
from ..caches.kind import Trimmed
from .rollback import singles


def new_caches(model: Any) -> list[Any]:
    """What the model makes for a sequence, in its own precision: a KV scheme is for the model that answers."""
    from mlx_lm.models.cache import KVCache

    return model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]


class Following:
    """`caches` hold the first `held` tokens of the sequence, and while a draft is out all of it but its last token behind them.

    A draft's tokens are computed one at a time, so rings and recurrent states cannot lose the last ones. They go back to where the draft
    began; what of it was right comes with the next tokens then, which have to be forwarded anyway.
    """

    def __init__(self, model: Any, caches: list[Any], held: int = 0):
        self.caches = caches
        self.held = held
        self._model = model
        self._ahead = 0  # drafted tokens in the caches
        self._before: list[tuple[Any, Kind, Any]] = []  # each cache, and what it was where the draft began; None where it can lose its last tokens

    @property
    def settled(self) -> bool:
        """Whether the caches hold the sequence's tokens alone."""
        return not self._ahead

    def forward(self, tokens: Sequence[int]) -> mx.array:
        """Forward the next tokens of the sequence; their logits (tokens, vocabulary)."""
        logits = self._model(mx.array([list(tokens)]), cache=self.caches)[0]
        self.held += len(tokens)
        return logits

    def compute(self) -> None:
        """Have what was forwarded computed, without waiting for it."""
        mx.async_eval([cache.state for cache in self.caches])

    def draft(self, tokens: Sequence[int], most: int, choose: Callable[[mx.array], mx.array]) -> list[mx.array]:
        """Forward the next tokens of the sequence and draft `most` behind them, each (1,) and chosen from logits (1, vocabulary). Nothing is computed yet."""
        drafted = [choose(self.forward(tokens)[-1:])]
        if most > 1:
            held = [(cache, kind_of(cache)) for cache in singles(self.caches)]
            self._before = [(cache, kind, None if isinstance(kind, Trimmed) else kind.lend(cache)) for cache, kind in held]
        while len(drafted) < most:
            drafted.append(choose(self._model(drafted[-1][None], cache=self.caches)[0]))
            self._ahead += 1
        return drafted

    def settle(self, right: int) -> None:
        """The first `right` tokens of the draft became the sequence's; the others go."""
        right, wrong = min(right, self._ahead), max(self._ahead - right, 0)
        if wrong and any(before is not None for _, _, before in self._before):
            right, wrong = 0, self._ahead
        for cache, kind, before in self._before if wrong else ():
            if before is None:
                kind.unwind(cache, wrong)
            else:
                vars(cache).clear()
                vars(cache).update(vars(before))
        self.held += right
        self._ahead, self._before = 0, []
