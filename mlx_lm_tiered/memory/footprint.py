"""What a model's caches will take for a number of tokens: by its KV scheme's plan, or learned from its own caches.

A cache with keys and values takes bytes per token, up to its window if it has one;
any other (recurrent state) takes what it takes. Nothing is read from a model's
configuration, whose fields mean something else in every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_lm_hooks import Row

from ..schemes.cost import GROWTH, Layer, window_of


class Planned(Protocol):
    """A KV scheme's plan for a model: each cache's layers."""

    @property
    def layers(self) -> tuple[tuple[Layer, ...], ...]: ...


PlanOf = Callable[[Any], Planned | None]


@dataclass(frozen=True)
class Footprint:
    """A model's weights in bytes, and its layers' caches."""

    weights: int
    layers: tuple[Layer, ...]

    def nbytes(self, tokens: int, step: int, slots: int = 0) -> int:
        """Bytes of one sequence's caches that hold that many tokens; as a row of a batch they have `slots` for tokens."""
        return int(sum(layer.taken(tokens, step, slots) for layer in self.layers))

    def peak(self, tokens: int, step: int, slots: int = 0, held: int = 0) -> int:
        """The most that they take on the way there from `held` tokens: at a KV scheme's start all are in full precision, and become quantized one after the other."""
        most = self.nbytes(tokens, step, slots)
        changing = [layer for layer in self.layers if layer.quantized is not None and held < layer.start <= tokens]
        if not changing:
            return most
        start = changing[0].start
        return max(most, self.nbytes(start - 1, step, start) + int(max(layer.taken(start, step, start) for layer in changing)))

    def per_token_at(self, tokens: int) -> int:
        """Bytes by which a sequence of that many tokens grows with the next, its rings being full."""
        return int(sum(layer.price(tokens) for layer in self.layers if layer.window is None))

    def decoded(self, rows: Sequence[Row]) -> int:
        """Bytes that rows take for the next `GROWTH` tokens of each, or as many as may still come."""
        return sum(self.per_token_at(row.held) * (GROWTH if row.left < 0 else min(GROWTH, row.left)) for row in rows)

    @property
    def per_token(self) -> int:
        """Bytes that a long sequence grows by with each token."""
        return self.per_token_at(max((layer.start for layer in self.layers), default=0) + 1)

    @property
    def computed_per_token(self) -> int:
        """Bytes of a token's keys and values as they are computed, before they are quantized."""
        return int(sum(layer.per_token if layer.computed is None else layer.computed for layer in self.layers if layer.window is None))


def measure(model: Any, draft: Any = None, caches: Sequence[Any] | None = None, plan_of: PlanOf = lambda model: None) -> Footprint:
    """Learn from the models' plans, else from `caches`, which hold tokens, or from a forward pass of one token, which costs what one decode step does.

    Generation thread only. `draft` is a second model whose caches follow the first's.
    """
    models = [m for m in (model, draft) if m is not None]
    parameters: list[Any] = [tree_flatten(m.parameters()) for m in models]
    weights = sum(array.nbytes for named in parameters for _, array in named)
    if caches:
        return Footprint(weights, tuple(_layer(cache) for cache in _leaves(caches)))
    return Footprint(weights, tuple(layer for m in models for layer in _layers(m, plan_of)))


def _layers(model: Any, plan_of: PlanOf) -> Iterator[Layer]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)  # which has a scheme make its plan
    plan = plan_of(model)
    if plan is not None:
        yield from (layer for layers in plan.layers for layer in layers)
        return
    model(mx.array([[0]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    yield from map(_layer, _leaves(caches))


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _layer(cache: Any) -> Layer:
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    arrays = [array for side in (keys, values) for array in (side if isinstance(side, (tuple, list)) else [side]) if array is not None]
    if not arrays or any(array.ndim != 4 for array in arrays):
        return Layer(constant=getattr(cache, "nbytes", 0))
    per_token = sum(array.nbytes / array.shape[-2] for array in arrays)
    return Layer(per_token, window_of(cache))
