"""What a model's caches will take for a number of tokens, learned from its own caches.

A cache with keys and values takes bytes per token, up to its window if it has one;
any other (recurrent state) takes what it takes. Nothing is read from a model's
configuration, whose fields mean something else in every architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

# Upstream's caches grow by this many tokens.
GROWTH = 256


@dataclass(frozen=True)
class Layer:
    """One cache: bytes per token, the most tokens it keeps, and bytes that do not depend on tokens. `element`: bytes of one number, 0 if it is quantized already."""

    per_token: float = 0.0
    window: int | None = None
    constant: int = 0
    element: int = 2

    def nbytes(self, tokens: int, step: int, scheme: str) -> float:
        """Bytes for that many tokens, prefilled `step` at a time."""
        slots = (tokens // GROWTH + 1) * GROWTH
        if self.window is not None:
            # A chunk is appended whole before the window is cut.
            return self.constant + min(slots, self.window + step) * self.per_token
        quantized = re.fullmatch(r"affine:(\d+):(\d+)@(\d+)", scheme)
        if quantized is None or not self.element:
            return self.constant + slots * self.per_token
        bits, group, start = map(int, quantized.groups())
        # A scale and a bias for each group; and plain ones up to the start, and until they are converted.
        share = bits / 8 / self.element + 2 / group
        return self.constant + (slots * share + min(slots, start + step)) * self.per_token


@dataclass(frozen=True)
class Footprint:
    """A model's weights in bytes, and its layers' caches."""

    weights: int
    layers: tuple[Layer, ...]

    def nbytes(self, tokens: int, step: int, scheme: str = "plain") -> int:
        """Bytes of one sequence's caches for that many tokens."""
        return int(sum(layer.nbytes(tokens, step, scheme) for layer in self.layers))

    @property
    def per_token(self) -> int:
        """Bytes that a long sequence grows by with each token."""
        return int(sum(layer.per_token for layer in self.layers if layer.window is None))


def measure(model: Any, draft: Any = None, caches: Sequence[Any] | None = None) -> Footprint:
    """Learn from `caches`, which hold tokens, or else from a forward pass of one token, which costs what one decode step does.

    Generation thread only. `draft` is a second model whose caches follow the first's.
    """
    models = [m for m in (model, draft) if m is not None]
    weights = sum(array.nbytes for m in models for _, array in tree_flatten(m.parameters()))
    if not caches:
        caches = [cache for m in models for cache in _probed(m)]
    return Footprint(weights, tuple(_layer(cache) for cache in _leaves(caches)))


def _probed(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


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
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    return Layer(per_token, window, element=0 if isinstance(keys, (tuple, list)) else arrays[0].itemsize)
