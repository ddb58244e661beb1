"""Whether memory has room for the caches of a model beside the one that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .footprint import Footprint, measure


class Room:
    """Asked for a draft model, whose caches no request is billed for. `spare` gives the bytes that the memory budget has left. Generation thread only."""

    def __init__(self, spare: Callable[[], float]):
        self._spare = spare
        self._footprint: Footprint | None = None

    def __call__(self, model: Any, new_caches: Callable[[Any], list[Any]], tokens: int, step: int) -> bool:
        """Whether caches of `tokens` tokens fit, computed so many at a time; always asked of the same model."""
        if self._footprint is None:
            caches = new_caches(model)
            model(mx.array([[0]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            self._footprint = measure(model, caches=caches)
        return self._footprint.nbytes(tokens, step) <= self._spare()
