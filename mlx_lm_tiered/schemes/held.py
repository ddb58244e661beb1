"""What a cache hands to attention where kernels read its buffers: the buffers, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..kernels.layout import Layout
from ..kernels.records import Record


class Held:
    """Keys or values: the first `slots` tokens of `buffers`. They are cut out only where something else than a kernel asks for them.

    Cutting takes Python longer than writing a token does. Like the arrays of any cache,
    it is of the moment: after the cache's next update it holds other tokens.
    """

    __slots__ = ("_cut", "_made", "buffers", "layout", "slots")

    def __init__(self, buffers: Sequence[mx.array], slots: int, layout: Layout, cut: Callable[[list[mx.array]], Any]):
        self.buffers, self.slots, self.layout = buffers, slots, layout
        self._cut, self._made = cut, None

    # A layer that reads another's has no cache to tell that they are not plain: see the seam of mlx-lm's attention.

    @property
    def bits(self) -> int:
        return self.layout.key_bits

    @property
    def group_size(self) -> int:
        return self.layout.group_size

    def cut(self) -> Any:
        """The arrays of the tokens alone, as a cache hands them out without kernels."""
        if self._made is None:
            self._made = self._cut(self._arrays())
        return self._made

    def _arrays(self) -> list[mx.array]:
        return [buffer[:, :, : self.slots] for buffer in self.buffers]

    def __iter__(self) -> Iterator[mx.array]:
        return iter(self.cut())

    def __getitem__(self, index: int) -> mx.array:
        return self.cut()[index]

    def __len__(self) -> int:
        return len(self.buffers)


class HeldRecords(Held):
    """The keys, or the values (`side` 0 or 1), of records (rows, heads, slots or more, words)."""

    __slots__ = ("_side", "record")

    def __init__(self, records: mx.array, slots: int, record: Record, side: int, cut: Callable[[list[mx.array]], Any]):
        super().__init__((records,), slots, record.layout, cut)
        self.record, self._side = record, side

    def _arrays(self) -> list[mx.array]:
        return [sides[self._side] for sides in self.record.split(self.buffers[0][:, :, : self.slots])]

    def __len__(self) -> int:
        return len(self.cut())
