"""Paged caches: a row's blocks are shared where others copy or share whole buffers.

On disk they are what caches without paging are, under the same kind: paging moves numbers
and changes none, so what one start has written the next one reads, with pages or without.
Registered by `paged.scheme`, so that nothing of paging is imported where it is off.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import mlx.core as mx

from .attention import TOKEN_AXIS
from .kind import Dump, Kind, Tensor, Trimmed, kind_of


class PagedKind(Trimmed):
    """PagedKVCache."""

    name = "kv-paged"
    class_name = "mlx_lm_tiered.paged.cache.PagedKVCache"

    def signature(self, cache: Any) -> str:
        form = self.stored_signature(cache)
        return f"kv:paged:{cache.storage.block}" + (f":{form}" if self.quantized(cache) else "")

    def stored_as(self, cache: Any) -> str:
        return kind_of(cache.sides.like).name

    def stored_signature(self, cache: Any) -> str:
        like = cache.sides.like
        return kind_of(like).signature(like)

    def quantized(self, cache: Any) -> bool:
        like = cache.sides.like
        return kind_of(like).quantized(like)

    def empty(self, cache: Any) -> bool:
        return cache.offset == 0

    def length(self, cache: Any) -> int | None:
        return cache.offset or None

    def can_cut(self, cache: Any, n: int) -> bool:
        return 0 <= n <= cache.offset or self.empty(cache)

    def stays_cuttable(self, cache: Any) -> bool:
        return True

    def lend(self, cache: Any, n: int | None = None) -> Any:
        """A cache over the same blocks, of which the first write copies the last one where it is not full."""
        return cache.lent(n)

    def dump(self, cache: Any) -> Dump:
        """As a cache without paging. The tensors are read out of the blocks when they are asked for: a view would be in the way of the next write."""
        like, offset = cache.sides.like, cache.offset
        tensors = {plane.name: Tensor(cache.later(tensor), TOKEN_AXIS) for tensor, plane in enumerate(cache.sides.tensors)}
        return Dump(kind_of(like).fields(like, offset), tensors if offset else {})

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        raise ValueError("paged caches are stored as those without paging")

    def nbytes(self, cache: Any) -> int:
        return cache.nbytes

    def shared(self, cache: Any) -> dict[Hashable, int]:
        size = cache.storage.arenas.layer_bytes(cache.layer)
        return {(id(cache.storage), cache.layer, block): size for block in cache.table.blocks}

    def rest(self, cache: Any) -> None:
        cache.table.reservation = None  # what a request that was not in a batch had left

    def row(self, cache: Any) -> Any | None:
        return type(cache).merge([cache])


class BatchPagedKind(Trimmed):
    """BatchPagedKVCache. Rows differ in length, so it counts no tokens and is never cut or stored; rows are extracted."""

    name = "batch-kv-paged"
    class_name = "mlx_lm_tiered.paged.batch.BatchPagedKVCache"

    def signature(self, cache: Any) -> str:
        return f"batch:kv:paged:{cache.storage.block}"

    def empty(self, cache: Any) -> bool:
        return cache.empty()

    def length(self, cache: Any) -> int | None:
        return None

    def can_cut(self, cache: Any, n: int) -> bool:
        return self.empty(cache)

    def lend(self, cache: Any, n: int | None = None) -> Any:
        return cache.lent()

    def dump(self, cache: Any) -> Dump:
        raise ValueError("a batch of paged rows is not stored as one")

    def load(self, fields: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
        raise ValueError("a batch of paged rows is not stored as one")

    def nbytes(self, cache: Any) -> int:
        return cache.nbytes


KINDS: tuple[Kind, ...] = (PagedKind(), BatchPagedKind())
