"""How a cache that kernels read keeps a token: keys and values of a head side by side, in one record of words. So a step writes one array, and a kernel is given one.

A record has the codes of the keys, those of the values, then the other numbers: of an affine
layout scales and biases of the keys, then of the values; of TurboQuant's scales and zero
points of the keys, then scales of the values. In each the order is that of the arrays
that they are in elsewhere, the planes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ..turboquant.codebooks import GROUP
from .layout import Layout

Planes = list[tuple[mx.array, mx.array]]


class Record:
    """A record of keys of `key_dim` and values of `value_dim`, `numbers` being the type of scales. One object for each; see `record_of`."""

    def __init__(self, layout: Layout, key_dim: int, value_dim: int, numbers: mx.Dtype):
        self.layout, self.key_dim, self.value_dim, self.numbers = layout, key_dim, value_dim, numbers
        groups = key_dim // layout.group_size, value_dim // layout.group_size
        # In words, and in numbers.
        self.codes = key_dim * layout.key_bits // 32, value_dim * layout.value_bits // 32
        self.counts = (2 * groups[0], groups[1]) if layout.turbo else (groups[0], groups[0], groups[1], groups[1])
        self.words = sum(self.codes) + sum(self.counts) * numbers.size // 4

    def __deepcopy__(self, memo: Any) -> Record:
        # There is one of each, and a type cannot be copied with a cache.
        return self

    def takes(self, element: mx.Dtype) -> bool:
        """Whether keys and values of a type are encoded straight into it."""
        return self.layout.turbo or element == self.numbers

    @property
    def whole(self) -> bool:
        """Whether all parts are whole words."""
        layout = self.layout
        return not (self.key_dim * layout.key_bits % 32 or self.value_dim * layout.value_bits % 32 or sum(self.counts) * self.numbers.size % 4)

    @property
    def alignment(self) -> tuple[int, int]:
        """Bytes, 16 at most, of which codes of all tokens begin at multiples; and runs of other numbers."""
        begins = [4 * self.words, 4 * sum(self.codes)]
        for count in self.counts[:-1]:
            begins.append(begins[-1] + count * self.numbers.size)
        return math.gcd(16, 4 * self.words, 4 * self.codes[0]), math.gcd(16, *begins)

    def split(self, records: mx.array) -> Planes:
        """The planes (rows, heads, slots, width) of keys and of values in records (rows, heads, slots, words), as views."""
        key, both = self.codes[0], sum(self.codes)
        found = [(records[..., :key], records[..., key:both])]
        numbers = list(self._numbers(records[..., both:].view(self.numbers)))
        half = (len(numbers) + 1) // 2
        return found + list(zip(numbers[:half], numbers[half:], strict=True))

    def _numbers(self, numbers: mx.array) -> Iterator[mx.array]:
        at = 0
        for count in self.counts:
            yield numbers[..., at : at + count]
            at += count

    def join(self, planes: Sequence[tuple[mx.array, mx.array]]) -> mx.array:
        """Records of what `split` gives."""
        codes, *others = planes
        numbers = mx.concatenate([plane for side in zip(*others, strict=True) for plane in side], axis=-1)
        return mx.concatenate([*codes, numbers.astype(self.numbers).view(mx.uint32)], axis=-1)


@cache
def record_of(layout: Layout, key_dim: int, value_dim: int, numbers: mx.Dtype) -> Record | None:
    """The record of these, or None where parts would not be whole words."""
    unfit = key_dim % layout.group_size or value_dim % layout.group_size or (layout.turbo and layout.group_size != GROUP)
    made = None if unfit else Record(layout, key_dim, value_dim, numbers)
    return made if made is not None and made.whole else None


def record_for(layout: Layout, keys: mx.array, values: mx.array) -> Record | None:
    """The record in which a layout has these keys and values (rows, heads, tokens, dim)."""
    numbers = mx.float16 if layout.turbo else keys.dtype
    if numbers not in (mx.float16, mx.bfloat16, mx.float32) or values.dtype != keys.dtype:
        return None
    return record_of(layout, keys.shape[3], values.shape[3], numbers)


def record_in(layout: Layout, planes: Any) -> Record | None:
    """The record of such planes."""
    (_, _), *others = planes
    keys, values = others[0]
    each = 2 if layout.turbo else 1
    if keys.dtype != values.dtype:
        return None
    return record_of(layout, keys.shape[3] * layout.group_size // each, values.shape[3] * layout.group_size, keys.dtype)
