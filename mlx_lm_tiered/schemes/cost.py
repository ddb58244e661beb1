"""What one cache of a model takes for a number of tokens: the only place where that is said.

Caches are of three types: those with keys and values of every token (``full``), those
that keep the last ones only (``window``), and those that take what they take
(``recurrent``). A KV scheme changes what a token costs, from its start on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# Upstream's caches grow by multiples of this many tokens.
GROWTH = 256

Type = Literal["full", "window", "recurrent"]


def window_of(cache: Any) -> int | None:
    """The most tokens that a cache keeps; None for all of them."""
    return getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)


@dataclass(frozen=True)
class Layer:
    """One cache. Bytes.

    `per_token` is what a token takes as the model makes it, `quantized` what it takes
    in a sequence of `start` tokens or more (None: this layer is never quantized).
    `computed` is what a token's keys and values take where they are computed, if that is not `per_token`:
    those of a pool cost no more than the pool does. `window` bounds the tokens that are kept; `constant` does not depend on tokens.
    """

    per_token: float = 0.0
    window: int | None = None
    constant: int = 0
    quantized: float | None = None
    start: int = 0
    computed: float | None = None

    @property
    def type(self) -> Type:
        if not self.per_token and self.quantized is None:
            return "recurrent"
        return "full" if self.window is None else "window"

    def price(self, tokens: int) -> float:
        """Of one token, in a sequence of that many."""
        return self.per_token if self.quantized is None or tokens < max(1, self.start) else self.quantized

    def bytes_at(self, tokens: int) -> float:
        """Of a sequence of that many tokens, without room for growth."""
        return self.constant + (tokens if self.window is None else min(tokens, self.window)) * self.price(tokens)

    def taken(self, tokens: int, step: int, slots: int) -> float:
        """Of its buffers at most, when it was prefilled `step` at a time and a row of a batch has `slots` for tokens."""
        # Upstream adds room from the token on at which there is none left, not in whole multiples.
        slots = max(tokens, slots) + GROWTH
        if self.window is not None:
            # A chunk is appended whole before the window is cut.
            slots = min(slots, self.window + step)
        return self.constant + slots * self.price(tokens)
