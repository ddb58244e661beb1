"""How a row's next token comes from its log-probabilities: whether at random, and from what."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

# The last step of the sampler that `make_sampler` builds.
LAST = "categorical_sampling"


class Drawing:
    """The part of the contract's `SpeculativeRow` that its sampler and logits processors decide."""

    _sampler: Any
    _processors: Any
    _seeded: bool  # whether its client chose the random numbers

    @property
    def independent(self) -> bool:
        return not self._processors

    @property
    def together(self) -> bool:
        return self.independent and self._greedy

    @property
    def _greedy(self) -> bool:
        from mlx_lm.sample_utils import greedy_sampler

        return self._sampler is greedy_sampler  # which nothing wraps (see `isolation`)

    @property
    def draws(self) -> Literal["greedy", "seeded", "random", "unknown"]:
        if self._greedy:
            return "greedy"
        if self._seeded:
            return "seeded"
        return "random" if shown(self._sampler) is not None else "unknown"

    def probabilities(self, logprobs: Any) -> Any:
        import mlx.core as mx

        sampler = shown(self._sampler)
        assert sampler is not None, "only of a row that draws at random"
        # Row by row, as decoding does: some samplers toss a coin for each call.
        return mx.concatenate([sampler(logprobs[at : at + 1]) for at in range(logprobs.shape[0])])


def shown(sampler: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """One of `make_sampler`'s samplers with the probabilities (float32) from which it would draw in place of its last step, the draw. None of any other."""
    from mlx_lm import sample_utils

    inner = inspect.unwrap(sampler)
    if not isinstance(inner, FunctionType) or inner.__module__ != sample_utils.__name__ or LAST not in inner.__code__.co_names:
        return None
    names = {**inner.__globals__, LAST: _probabilities}
    return FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)


def _probabilities(logits: Any, temp: float) -> Any:
    import mlx.core as mx

    return mx.softmax((logits * (1.0 / temp)).astype(mx.float32), axis=-1)
