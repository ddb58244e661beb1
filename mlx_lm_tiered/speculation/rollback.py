"""Taking back what a verified chunk put into the caches beyond the accepted tokens."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from ..caches import kind_of
from ..schemes.convert import leaves
from ..schemes.mixed import MixedBatch


class Rollback:
    """The way back from a chunk of `size` tokens. Make it before the chunk is forwarded. Raises UnknownCacheClass.

    Caches that can lose the chunk's last tokens just lose them. If one of them cannot (recurrent
    state), all go back to before the chunk, and its accepted tokens are to be forwarded once more.
    """

    def __init__(self, caches: Sequence[Any], size: int):
        self._left = size
        held = [(cache, kind_of(cache)) for cache in singles(caches)]
        self.replays = not all(kind.unwinds(cache, whole=False) for cache, kind in held)
        for cache, kind in held:
            kind.order(cache)
        # A lent cache keeps its values, whatever the lender does; what can be unwound needs none.
        # The caches are the row's: when it has ended, what they hold must go, though nobody has dropped this yet.
        self._held = [(weakref.ref(cache), kind, None if kind.unwinds(cache, whole=self.replays) else kind.lend(cache)) for cache, kind in held]

    def keep(self, count: int) -> bool:
        """Keep the chunk's first `count` tokens, at least one. True when the caches are as before the chunk, and those tokens to be forwarded again.

        May be called again to keep fewer, while nothing else was forwarded.
        """
        if count == self._left:
            return False
        taken, self._left = (self._left if self.replays else self._left - count), count
        for held, kind, before in self._held:
            if (cache := held()) is None:
                continue
            if before is None:
                kind.unwind(cache, taken)
            else:
                # mlx-lm hands the objects around.
                vars(cache).clear()
                vars(cache).update(vars(kind.lend(before)))
        return self.replays


def singles(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, nested ones and those of a mixed batch's groups in place of what holds them."""
    for cache in leaves(caches):
        if isinstance(cache, MixedBatch):
            yield from (group.cache for group in cache.groups)
        else:
            yield cache
