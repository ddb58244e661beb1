"""The kernel over blocks, where the device has one: rows read their blocks where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..kernels.blocks import MOST_LENGTH, on_device
from ..kernels.choice import Kernels
from .attention import Rows
from .table import Table

# Entries by which a table's rows grow, so that few shapes come up.
WIDTH = 16


class OverBlocks:
    """Attention of `Rows` by a kernel; None for what it does not do: tokens of a KV scheme, masks of arrays, sinks, more than a few tokens, padded rows."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels
        # Layers ask for the same table one after the other.
        self._listed: tuple[list[int], mx.array] | None = None
        self._counted: tuple[list[int], mx.array] | None = None

    def __call__(self, rows: Rows, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array | None:
        tokens = queries.shape[2]
        if tokens > MOST_LENGTH or sinks is not None or isinstance(mask, mx.array) or any(count != tokens for count in rows.counts):
            return None
        arenas = rows.tables[0].storage.arenas
        if hasattr(arenas.layers[rows.layer], "bits"):
            return None
        keys, values = arenas.planes[rows.layer]
        lengths = [before + tokens for before in rows.before]
        table = self._table(rows.tables)
        return self._kernels.attend_blocks(queries, keys, values, table, self._lengths(lengths), scale, arenas.block, max(lengths))

    def _table(self, tables: Sequence[Table]) -> mx.array:
        versions = [table.version for table in tables]
        if self._listed is None or self._listed[0] != versions:
            width = -(-max(len(table.blocks) for table in tables) // WIDTH) * WIDTH
            self._listed = versions, on_device([table.blocks + [0] * (width - len(table.blocks)) for table in tables])
        return self._listed[1]

    def _lengths(self, lengths: list[int]) -> mx.array:
        if self._counted is None or self._counted[0] != lengths:
            self._counted = lengths, on_device(lengths)
        return self._counted[1]
