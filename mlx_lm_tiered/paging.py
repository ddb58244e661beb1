"""Paged KV in a run: the pools, which stored prefixes lend their blocks, and which go when blocks are needed. Imported where it is on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_lm_hooks import ModelSource

from . import drafting
from .index.keys import token_key
from .paged.admission import Blocks
from .paged.scheme import Pages
from .settings import Settings, default_ram_bytes
from .speculation.choose import MOST, Drafting
from .statistics import Statistics

if TYPE_CHECKING:
    from .prefix.ram import Entry
    from .prefix.relief import Relief
    from .prefix.tiers import TieredPrefixCache
    from .schemes.scheme import Scheme


class Paging:
    """`caches()` are the run's prefix caches, and `queued()` what is in memory only until it is written."""

    def __init__(
        self,
        settings: Settings,
        statistics: Statistics,
        scheme: Scheme | None,
        chosen: Drafting,
        relief: Relief,
        caches: Callable[[], list[TieredPrefixCache]],
        queued: Callable[[], list[Any]],
    ):
        self._drafting, self._caches, self._queued = chosen, caches, queued
        size = settings.paged_kv_pool
        self.pages = Pages(settings.paged_kv_block_size, default_ram_bytes() if size is None else size, statistics, settings.kernels, scheme)
        drafts = MOST if chosen.source != "off" else 0
        self.blocks = Blocks(self.pages, self._stored, lambda enough, choose: relief.until(enough, choose=choose), self._lender, drafts=drafts)

    def adopted(self, source: ModelSource, caches: list[Any], lender: tuple[Entry, int] | None) -> list[Any] | None:
        """Restored caches in blocks, of which those that hold what `lender` does are shared with it; a draft model's caches as they are without paging."""
        if source == drafting.identity(self._drafting):
            return self.pages.unpaged(caches)
        return self.pages.adopted(source.path, caches, *(lender or ()))

    def drop(self, namespace: Hashable) -> None:
        """Let go of a model's pool: what is stored in its blocks goes with the model."""
        for cache in self._caches():
            for entry in cache.entries():
                if entry.namespace == namespace:
                    cache.release(entry)
        self.pages.unloaded()

    def _stored(self) -> list[Any]:
        """All stored prefixes in memory."""
        return [entry for cache in self._caches() for entry in cache.entries()] + self._queued()

    def _lender(self, source: ModelSource, tokens: Sequence[int]) -> tuple[Entry, int] | None:
        """The stored prefix in memory that a request will find, and its length."""
        key = token_key(tokens)
        found = [one for cache in self._caches() if (one := cache.lender(source, tokens, key)) is not None]
        return max(found, key=lambda one: one[1], default=None)
