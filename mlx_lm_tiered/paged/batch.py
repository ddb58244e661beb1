"""Rows of a batch: a table each, of any length, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache, create_attention_mask, create_causal_mask

from .attention import Rows
from .cache import PagedKVCache, append_planes, newest, read
from .sides import Sides
from .table import Storage, Table

# Tokens of a step up to which a row's blocks are left to a kernel; prefills gather.
FEW = 8


class BatchPagedKVCache(_BaseCache):
    """Stands for mlx-lm's BatchKVCache of one layer, or a KV scheme's.

    One row gets the arrays that it would get alone. Several get a `Rows`, over which
    each row attends to its own tokens; where a model's attention must have arrays
    (`Storage.padded`), they are made for the moment, padded on the left as mlx-lm's are.
    """

    def __init__(self, tables: Sequence[Table], layer: int):
        self.tables, self.layer = list(tables), layer
        for table in self.tables:
            if table.lengths[layer] is None:
                table.lengths[layer] = 0
        self._last: tuple[list[int], list[int], int] = (self.lengths, [0] * len(self.tables), 0)  # of the last update: tokens of each row before, new ones, and the most
        self._apart = False  # whether what was fetched last are `Rows`
        self._coming: list[int] | None = None  # tokens that each row still gets, where rows are padded on the right

    @property
    def storage(self) -> Storage:
        return self.tables[0].storage

    @property
    def sides(self) -> Sides:
        """What the rows' tokens look like."""
        return self.storage.arenas.layers[self.layer]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [table.length(self.layer) for table in self.tables]

    @property
    def offset(self) -> mx.array:
        return self.storage.offsets(self.lengths)

    @property
    def bits(self) -> int:
        """Tells mlx-lm's attention of keys that are no arrays; there is no such attribute where they are."""
        return Rows.bits if self._apart else self.sides.bits

    @property
    def group_size(self) -> int:
        """As `bits`."""
        return Rows.group_size if self._apart else self.sides.group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens (rows, heads, tokens, dim); keys and values of all. Raises PoolExhausted."""
        tokens = keys.shape[2]
        before = self.lengths
        counts = [tokens] * len(before) if self._coming is None else [min(tokens, left) for left in self._coming]
        if self._coming is not None:
            self._coming = [left - count for left, count in zip(self._coming, counts, strict=True)]
        arrays = self.sides.encoded(keys, values)
        if tokens == 1 and len(before) > 1 and all(counts):
            for table in self.tables:
                table.extend(self.layer, 1)
            places = [table.slot(at) for table, at in zip(self.tables, before, strict=True)]
            self.storage.arenas.scatter(self.layer, self.storage.places(places), arrays)
        else:
            for row, (table, count) in enumerate(zip(self.tables, counts, strict=True)):
                if count:
                    append_planes(table, self.layer, [array[row : row + 1, :, :count] for array in arrays])
        self._last = before, counts, tokens
        return self._fetched(*self._last)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last update gave: layers that read another's ask for it."""
        return self._fetched(*self._last)

    def alone(self, most: int | None = None) -> tuple[mx.array, mx.array, int] | None:
        """As `PagedKVCache.alone`; None where there are several rows."""
        return newest(self.tables[0], self.layer, most) if len(self.tables) == 1 else None

    def _fetched(self, before: list[int], counts: list[int], tokens: int) -> tuple[Any, Any]:
        self._apart = not self.storage.padded and (len(self.tables) > 1 or self._in_pieces(tokens))
        if len(self.tables) == 1 and not self._apart:
            return read(self.tables[0], self.layer)
        if self._apart:
            rows = Rows(self.tables, self.layer, before, counts)
            return rows, rows
        asked = [table.version for table in self.tables], before, counts, tokens
        if self.storage.padding is None or self.storage.padding[0] != asked:
            width = max(before) + tokens
            slots = [_slots(table, at + count, max(before) - at, width) for table, at, count in zip(self.tables, before, counts, strict=True)]
            self.storage.padding = asked, mx.array(np.stack(slots))
        return self.sides.fetched(self.storage.arenas.padded(self.layer, self.storage.padding[1]))

    def _in_pieces(self, tokens: int) -> bool:
        """Whether a kernel may read one row's blocks, which would have to be gathered."""
        return self.storage.attend is not None and tokens <= FEW and not self.tables[0].in_one_run(self.layer)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None, **options: Any) -> Any:
        """As for one sequence where every row is masked alike; else an array over tokens that are padded on the left."""
        lengths = self.lengths
        if len(lengths) == 1:
            return create_attention_mask(N, offset=lengths[0], return_array=return_array, window_size=window_size)
        if not (return_array or window_size is not None or self.storage.padded):
            return None if N == 1 else "causal"
        padding = mx.array([max(lengths) - length for length in lengths])
        return create_causal_mask(N, offset=max(lengths), left_padding=padding, window_size=window_size, **options)

    def prepare(self, *, left_padding: Any = None, lengths: Sequence[int] | None = None, right_padding: Sequence[int] | None = None) -> None:
        """What comes has so many tokens of each row, and padding behind them."""
        if left_padding is not None and any(left_padding):
            raise ValueError("rows of blocks are not padded on the left")
        if right_padding is not None and max(right_padding) > 0:
            assert lengths is not None
            self._coming = list(lengths)

    def finalize(self) -> None:
        self._coming = None

    def filter(self, batch_indices: Any) -> None:
        rows: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.tables = [self.tables[row] for row in rows]

    def extend(self, other: BatchPagedKVCache) -> None:
        self.tables = self.tables + other.tables

    def extract(self, idx: int) -> PagedKVCache:
        """A row's cache, which shares its blocks."""
        table = self.tables[idx]
        return PagedKVCache(table.fork(self.layer, table.length(self.layer)), self.layer)

    def lent(self) -> BatchPagedKVCache:
        """The same rows over the same blocks."""
        return BatchPagedKVCache([table.fork(self.layer, table.length(self.layer)) for table in self.tables], self.layer)

    def __copy__(self) -> BatchPagedKVCache:
        return self.lent()

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPagedKVCache:
        # mlx-lm splits a batch into two copies and drops each row from one of them: tables move with their rows.
        return BatchPagedKVCache(self.tables, self.layer)

    @property
    def state(self) -> Any:
        """The layer's whole arenas, to be evaluated; keep nothing of it."""
        return list(self.storage.arenas.planes[self.layer])

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(n, max(self.lengths))
        for table in self.tables:
            table.trim(self.layer, n)
        return n

    def size(self) -> int:
        return max(self.lengths)

    def empty(self) -> bool:
        return not any(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that only these rows have, in this layer."""
        pool = self.storage.pool
        own = sum(pool.count(block) == 1 for table in self.tables for block in table.blocks)
        return own * self.storage.arenas.layer_bytes(self.layer)


def _slots(table: Table, stop: int, left: int, width: int) -> np.ndarray:
    """Where a row's first `stop` tokens are, `left` places before them and as many behind them as make `width`; those have any slot of the row's, whose numbers are finite."""
    runs = [np.arange(*run) for run in table.slots(0, stop)]
    own = np.concatenate(runs) if runs else np.zeros(0, int)
    slots = np.full(width, own[0] if len(own) else 0, np.int32)
    slots[left : left + len(own)] = own
    return slots
