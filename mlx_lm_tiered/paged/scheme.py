"""Paging as a KV scheme of the contract: caches of full attention are made over one pool, and attention knows rows of blocks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_lm_hooks import Refused

from ..caches import nested
from ..caches.kind import kind_named, register
from ..caches.paged import KINDS
from ..kernels.choice import Kernels
from ..schemes.convert import leaves
from ..schemes.scheme import Scheme
from ..statistics import Statistics
from . import attention, plan
from .batch import BatchPagedKVCache
from .cache import PagedKVCache
from .moving import into_blocks, layers_of, out_of_blocks
from .plan import Plan
from .pool import PoolExhausted
from .table import Storage, Table

logger = logging.getLogger("mlx_lm_tiered")

_ATTRIBUTE = "_mlx_lm_tiered_pages"

for _kind in KINDS:
    if kind_named(_kind.name) is None:
        register(_kind)


class Holds(Protocol):
    """A stored prefix."""

    @property
    def caches(self) -> list[Any]: ...


class Pages:
    """Implements the contract's `KVScheme` with blocks of `block` tokens out of `nbytes` for each model that is loaded.

    Blocks hold KV as `scheme` has it from a sequence's first token on, or in the model's own precision. What is stored is
    told from nothing else: entries are those of a start without paging. A model that paging cannot serve keeps the caches
    that it has without, with one warning.
    """

    start = 0

    def __init__(self, block: int, nbytes: int, statistics: Statistics, kernels: str = "auto", scheme: Scheme | None = None):
        self.block, self.nbytes, self.scheme = block, nbytes, scheme
        self._statistics = statistics
        self._kernels = Kernels(kernels, lambda text: statistics.fault("decode_kernel", text)) if scheme is None else scheme.kernels
        # To have so many blocks let go (see `Pool`); as a last resort, or only where it is of use.
        self.relieve: Callable[[Storage, int, bool], None] = lambda storage, missing, last: None
        self.storages: dict[Path | None, Storage] = {}  # of the model that is loaded; one beside it, that mlx-lm drafts with, is not paged

    # The contract

    def name(self, path: Path | None) -> str:
        return "plain" if self.scheme is None else self.scheme.name(path)

    def model_loaded(self, model: Any) -> None:
        """Make its pool, as the first request may have a prefix restored into it."""
        from mlx_lm.models.cache import make_prompt_cache

        make_prompt_cache(model)  # asks for `caches`

    def caches(self, model: Any, path: Path | None, caches: list[Any]) -> list[Any]:
        # What they are under the scheme; the plan is made of those that the model makes.
        theirs = caches if self.scheme is None else self.scheme.caches(model, path, copy.deepcopy(list(caches)))
        found = self._known(model, path, caches)
        if found is None or len(found[0].layers) != len(caches):
            return theirs
        return found[0].apply(theirs, found[1])

    def converts(self, model: Any) -> bool:
        return False

    def plain_class(self, cache: Any) -> type:
        from mlx_lm.models.cache import KVCache

        if isinstance(cache, PagedKVCache):
            return KVCache
        return type(cache) if self.scheme is None else self.scheme.plain_class(cache)

    def convert(self, caches: list[Any]) -> None:
        """Nothing begins later than at the first token."""

    def convert_rows(self, caches: list[Any], rows: Sequence[int]) -> None:
        """The same."""

    def merge(self, rows: Sequence[list[Any]]) -> list[Any] | None:
        return None

    def extend(self, batch: list[Any], other: list[Any]) -> list[Any]:
        for cache, more in zip(batch, other, strict=True):
            cache.extend(more)
        return batch

    def short(self, caches: list[Any]) -> tuple[int, Refused] | None:
        """A row that cannot have the block of its next token. The others have theirs then, or a promise of it."""
        tables = rows_of(caches)
        if not tables or tables[0].storage.pool.available >= len(tables):
            return None
        for row, table in enumerate(tables):
            if table.reservation is not None and table.reservation.left:
                continue
            try:
                table.make_room(1)
            except PoolExhausted as error:
                return row, error.with_traceback(None)
        return None

    def attention(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        return attention.build(upstream if self.scheme is None else self.scheme.attention(upstream))

    # For the tiers and admission

    def plan_of(self, model: Any) -> Any:
        """What the memory guard bills a request: the pool is there whoever uses it. Of a model that is not paged the KV scheme's."""
        known = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        if known is not None and known[0] is self and known[1] is not None:
            return known[1][0]
        return None if self.scheme is None else self.scheme.plan_of(model)

    def adopted(self, path: Path | None, caches: list[Any], lender: Holds | None = None, common: int = 0) -> list[Any] | None:
        """A request's caches with those of full attention in blocks; as they are where these are so already or the model is not paged, None where blocks are short.

        Whole blocks of the first `common` tokens are shared with the stored prefix `lender`, which holds the same ones and may be let
        go meanwhile.
        """
        storage = self.storages.get(path)
        if storage is None or not layers_of(caches, storage):
            return caches
        table = Table(storage)
        tokens = nested.common_length(caches) or 0
        shared = _share(table, lender, min(common, tokens)) if lender is not None else 0
        needed = storage.blocks_for(tokens) - len(table.blocks)
        if needed > storage.pool.available:
            self.relieve(storage, needed - storage.pool.available, False)
        if needed > storage.pool.available:
            return None
        return into_blocks(caches, table, shared)

    @staticmethod
    def unpaged(caches: list[Any]) -> list[Any]:
        """The same with copies of what is in blocks: for a model that drafts, and finds what it computed when it answered."""
        return out_of_blocks(caches)

    def unloaded(self) -> None:
        """The model goes. Let go of its pool; caches hold it as long as there are any."""
        self.storages.clear()

    def report(self) -> dict[str, Any]:
        """What `/stats` answers, of all pools. Any thread."""
        storages = list(self.storages.values())
        return {
            "kernels": self._kernels.state,
            "block_tokens": self.block,
            "block_bytes": max((storage.arenas.block_bytes for storage in storages), default=0),
            "blocks": sum(storage.pool.total for storage in storages),
            "blocks_used": sum(storage.pool.used for storage in storages),
            "blocks_shared": sum(storage.pool.shared for storage in storages),
            "blocks_reserved": sum(storage.pool.reserved for storage in storages),
            "blocks_peak": max((storage.pool.peak for storage in storages), default=0),
        }

    # Inside

    def _known(self, model: Any, path: Path | None, caches: list[Any]) -> tuple[Plan, Storage] | None:
        known = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        if known is not None and known[0] is self:
            return known[1]
        found = None
        try:
            made = None if self.storages else plan.make(model, caches, None if self.scheme is None else self.scheme.plan_of(model))
            if self.storages:
                logger.info("paged KV: the pool is another model's, and the caches of %s stay as they are", path or "this model")
            elif made is None:
                logger.warning("--paged-kv: none of the caches of %s is of full attention, and they stay as they are", path or "this model")
            else:
                blocks = self.nbytes // (made.token_bytes * self.block)
                if blocks < 1:
                    raise ValueError(f"--paged-kv-pool is {self.nbytes} bytes, and a block of {self.block} tokens takes {made.token_bytes * self.block}")
                storage = made.storage(blocks, self.block)
                if self._kernels.state == "on":
                    from .kernel import OverBlocks

                    storage.attend = OverBlocks(self._kernels)
                storage.pool.relieve = lambda missing: self.relieve(storage, missing, True)
                for layer in range(len(made.paged)):
                    storage.arenas.settle(layer)  # now, so that the memory guard sees what the pool takes
                found = made, storage
                self.storages[path] = storage
                logger.info("paged KV: %d blocks of %d tokens, %d bytes each", blocks, self.block, storage.arenas.block_bytes)
        except ValueError as error:
            self._statistics.fault("paged_kv", f"--paged-kv is off for {path or 'this model'}: {error}")
        if hasattr(model, "__dict__"):
            # Not through nn.Module's own __setattr__, which would make it a member of the model.
            object.__setattr__(model, _ATTRIBUTE, (self, found))
        return found


def _share(table: Table, lender: Holds, common: int) -> int:
    """Begin a table with the whole blocks of a stored prefix's first `common` tokens; returns how many tokens those are."""
    known = storage_of(lender.caches)
    shared = common // table.storage.block * table.storage.block
    if known is None or known[0] is not table.storage or not shared:
        return 0
    table.share(known[1], shared)
    return shared


def rows_of(caches: Sequence[Any]) -> list[Table] | None:
    """The tables of a batch's rows; None where none of its caches is paged."""
    return next((leaf.tables for leaf in leaves(caches) if isinstance(leaf, BatchPagedKVCache)), None)


def storage_of(caches: Sequence[Any] | None) -> tuple[Storage, Table] | None:
    """The pool and the table of a request's caches; None where none is paged."""
    for leaf in leaves(caches or ()):
        if isinstance(leaf, PagedKVCache):
            return leaf.storage, leaf.table
    return None
