"""Attention of several rows, each over its own blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .cache import read
from .table import Table


class Rows:
    """Keys and values of rows of different lengths, as a batch of tables hands them to attention: keys and values are the same object.

    Of row i, `before[i]` tokens were there before and `counts[i]` are new. It is of the
    moment: after the next update the tables hold other tokens.
    """

    __slots__ = ("before", "counts", "layer", "tables")
    # Of no format: that they are there says that this is no array (see `schemes.mixed`).
    bits = 0
    group_size = 0

    def __init__(self, tables: Sequence[Table], layer: int, before: Sequence[int], counts: Sequence[int]):
        self.tables, self.layer, self.before, self.counts = tuple(tables), layer, before, counts

    def attend(self, quantized: Callable[..., mx.array], queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """(rows, heads, tokens, value dim). Queries behind a row's new tokens are padding, and get zeros.

        An array `mask` is over tokens that are padded on the left to the longest row's. `quantized` attends to what is no plain array.
        """
        storage = self.tables[0].storage
        if storage.attend is not None:
            done = storage.attend(self, queries, scale, mask, sinks)
            if done is not None:
                return done
        tokens = queries.shape[2]
        outputs = [self._row(quantized, row, queries[row : row + 1], scale, mask, sinks) for row in range(len(self.tables))]
        dim = outputs[0].shape[3]
        for row, count in enumerate(self.counts):
            if count < tokens:
                padding = mx.zeros((1, queries.shape[1], tokens - count, dim), queries.dtype)
                outputs[row] = mx.concatenate([outputs[row], padding], axis=2)
        return mx.concatenate(outputs)

    def _row(self, quantized: Callable[..., mx.array], row: int, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        count, before = self.counts[row], self.before[row]
        table = self.tables[row]
        if count == 0:
            return mx.zeros((1, queries.shape[1], 0, table.storage.arenas.layers[self.layer].value_dim), queries.dtype)
        if isinstance(mask, mx.array):
            left = max(self.before) - before
            mask = mask[row : row + 1] if mask.ndim == 4 and mask.shape[0] > 1 else mask
            mask = mask[..., :count, left : left + before + count]
        elif count == 1:
            mask = None
        keys, values = read(table, self.layer)
        queries = queries[:, :, :count]
        if isinstance(keys, mx.array):
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        more = {} if sinks is None else {"sinks": sinks}
        return quantized(queries, keys, values, scale=scale, mask=mask, group_size=keys.group_size, bits=keys.bits, **more)


def build(quantized: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """What stands in for `quantized`, mlx-lm's quantized_scaled_dot_product_attention or what a KV scheme has for it: the same parameters, and `sinks`."""

    def attend(queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8, sinks: Any = None) -> mx.array:
        if isinstance(q_keys, Rows):
            return q_keys.attend(quantized, queries, scale, mask, sinks)
        more = {} if sinks is None else {"sinks": sinks}
        return quantized(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits, **more)

    return attend
