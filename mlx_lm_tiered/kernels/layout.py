"""How a cache's arrays hold keys and values, as far as the kernels are concerned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..turboquant import codebooks

if TYPE_CHECKING:  # settings name layouts, and commands that need neither mlx nor numpy read settings
    import mlx.core as mx

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


class Layout(NamedTuple):
    """mlx's affine quantization as (packed, scales, biases), or TurboQuant's form as (packed, scales); see `turboquant/codec.py`."""

    key_bits: int
    value_bits: int
    group_size: int
    turbo: bool = False

    @classmethod
    def affine(cls, bits: int, group_size: int) -> Layout:
        """Keys and values alike."""
        return cls(bits, bits, group_size)

    @classmethod
    def turboquant(cls, key_bits: int, value_bits: int) -> Layout:
        """Keys of `key_bits`, rotated values of `value_bits`."""
        return cls(key_bits, value_bits, codebooks.GROUP, True)

    def __str__(self) -> str:
        return f"turbo:k{self.key_bits}v{self.value_bits}" if self.turbo else f"affine:{self.key_bits}:{self.group_size}"

    @property
    def known(self) -> bool:
        """Whether there is a kernel for it."""
        if self.turbo:
            return self.key_bits in codebooks.KEY_BITS and self.value_bits in codebooks.VALUE_BITS
        return self.key_bits == self.value_bits and self.key_bits in AFFINE_BITS and self.group_size in AFFINE_GROUPS

    def fits(self, keys: Sequence[mx.array], values: Sequence[mx.array], dim: int) -> bool:
        """Whether both sides have heads of `dim`."""
        if dim % self.group_size:
            return False
        if self.turbo:
            return codebooks.unfit(dim) is None and (keys[1].shape[3], values[1].shape[3]) == (2 * dim // codebooks.GROUP, dim // codebooks.GROUP)
        return keys[1].shape[3] * self.group_size == dim == values[1].shape[3] * self.group_size

    def inputs(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> list[mx.array]:
        """What the kernel takes of both: six arrays, under the names of an affine layout."""
        if self.turbo:
            return [*keys, keys[1], *values, table(self.value_bits)]
        return [*keys, *values]

    def back(self, dim: int) -> list[mx.array]:
        """What undoes the rotation of values, after a Hadamard matrix of ones: a sign of each dimension over the root of `dim`, in fp32. Nothing where there was none."""
        return [_signs(dim)] if self.turbo else []

    @property
    def lowered(self) -> int:
        """What centroids are divided by in the table, so that the largest times the largest scale is a half."""
        return 8 if self.value_bits == 8 else 4

    @property
    def table_bytes(self) -> int:
        """Of the table's copies in a block's memory (`common.inc`)."""
        return 4 * table(self.value_bits).size * (8 if self.value_bits == 8 else 32) if self.turbo else 4


@cache
def table(bits: int) -> mx.array:
    """What TurboQuant's values are looked up in, uint32 (1, 1, 1, entries): centroids as halves, or up to 3 bits two, by the codes of two tokens."""
    import mlx.core as mx
    import numpy as np

    halves = (np.array(codebooks.code_book(bits), np.float32) / Layout.turboquant(8, bits).lowered).astype(np.float16).view(np.uint16).astype(np.uint32)
    found = (halves[:, None] << 16 | halves).ravel() if bits <= 3 else halves
    return _ready(mx.array(found).reshape(1, 1, 1, -1))


@cache
def _signs(dim: int) -> mx.array:
    import mlx.core as mx

    return _ready(mx.array(codebooks.signs(dim), mx.float32) * dim**-0.5)


def _ready(array: mx.array) -> mx.array:
    """For every thread, where only an evaluated one is; and in the device's memory, where what it has computed is."""
    import mlx.core as mx

    made = array * 1
    mx.eval(made)
    return made
