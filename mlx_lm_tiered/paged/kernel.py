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
    """Attention of `Rows` by a kernel; None for what it does not do: masks of arrays, sinks, padded rows, more than a few tokens, or of a KV scheme's more than one, or not in records."""

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
        sides, planes = arenas.layers[rows.layer], arenas.planes[rows.layer]
        record = sides.record
        if (record is None and hasattr(sides, "bits")) or (record is not None and tokens > 1):
            return None
        lengths = [before + tokens for before in rows.before]
        table, counted = self._table(rows.tables), self._lengths(lengths)
        if record is None:
            keys, values = planes
            return self._kernels.attend_blocks(queries, keys, values, table, counted, scale, arenas.block, max(lengths))
        (held,) = planes
        return self._kernels.attend_listed(queries, held, record, table, counted, scale, arenas.block, max(lengths))

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
