"""One line in the log for each request, as long as nobody drowns in them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from .lookup import Lookup

logger = logging.getLogger("mlx_lm_tiered")

MOST, WINDOW = 60, 60.0  # lines in so many seconds; what is beyond is one line together


@dataclass
class _Sum:
    requests: int = 0
    hits: int = 0
    reused: int = 0
    prompts: int = 0


class Telling:
    """Writes what became of lookups. Generation thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._until = 0.0
        self._lines = 0
        self._left = _Sum()

    def tell(self, lookup: Lookup) -> None:
        """A line of its own, or part of the one that comes when the time is over."""
        if self._clock() >= self._until:
            self._sum_up()
            self._until, self._lines = self._clock() + WINDOW, 0
        if self._lines < MOST:
            self._lines += 1
            logger.info("%s", lookup)
        else:
            self._left.requests += 1
            self._left.hits += lookup.reused_tokens > 0
            self._left.reused += lookup.reused_tokens
            self._left.prompts += lookup.prompt_tokens

    def turn(self) -> None:
        """Sum up what was left out, when it is time. For idle turns."""
        if self._left.requests and self._clock() >= self._until:
            self._sum_up()

    def _sum_up(self) -> None:
        left, self._left = self._left, _Sum()
        if left.requests:
            logger.info("%d more requests, %d of which reused something: %d of %d prompt tokens", left.requests, left.hits, left.reused, left.prompts)
