"""KV caches of the TurboQuant scheme: two of mlx-lm's caches in lockstep, one for packed indices, one for scales.

Only what is appended is encoded. A key's scales have its zero points behind them, a
value's have none (`turboquant/codec.py`). Scales are fp16 whatever the model computes
in, so the caches remember the model's type: rows that are not converted yet are padded
in it when they share a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..turboquant.codebooks import GROUP
from ..turboquant.codec import encode_keys, encode_values
from .lockstep import Batch, Lockstep, Single
from .spec import Turbo

PARTS = ("packed", "scales")


class Pair(tuple[mx.array, ...]):
    """Keys or values as (packed, scales), each (rows, heads, slots, width), with their bits."""

    bits: int
    group_size = GROUP

    @classmethod
    def of(cls, arrays: Iterable[mx.array], bits: int) -> Self:
        made = cls(arrays)
        made.bits = bits
        return made


class TurboQuant(Lockstep):
    """What both forms share. `element` names the type that keys and values came in; None before the first came."""

    names, form_class = PARTS, Turbo
    element: str | None

    def __init__(self, *arguments: Any, key_bits: int = 8, value_bits: int = 3):
        self._set(tuple(self.inner(*arguments) for _ in PARTS), Turbo(key_bits, value_bits))

    def _set(self, parts: tuple[Any, ...], form: Any) -> None:
        super()._set(parts, form)
        self.element = None

    def adopt(self, other: Any) -> None:
        if self.element is None:
            self.element = other.element if isinstance(other, TurboQuant) else type_name(other.keys.dtype)

    @classmethod
    def encoded(cls, form: Turbo, keys: mx.array, values: mx.array) -> list[tuple[mx.array, mx.array]]:
        return list(zip(encode_keys(keys, form.key_bits), encode_values(values, form.value_bits), strict=True))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Pair, Pair]:
        if self.element is None:
            self.element = type_name(keys.dtype)
        return super().update_and_fetch(keys, values)

    def keys_of(self, arrays: Sequence[mx.array]) -> Pair:
        return Pair.of(arrays, self.form.key_bits)

    def values_of(self, arrays: Sequence[mx.array]) -> Pair:
        return Pair.of(arrays, self.form.value_bits)

    def shapes(self) -> list[tuple[int, int, mx.Dtype]]:
        assert self.keys is not None and self.values is not None and self.element is not None
        dtype = getattr(mx, self.element)
        widths = (self.keys[1].shape[3] // 2, self.values[1].shape[3])
        return [(side[1].shape[1], width * GROUP, dtype) for side, width in zip((self.keys, self.values), widths, strict=True)]

    @property
    def state(self) -> Any:
        return (*super().state, self.element)

    @state.setter
    def state(self, value: Any) -> None:
        *rest, element = value
        Lockstep.state.fset(self, rest)  # type: ignore[attr-defined]
        self.element = element


class TurboQuantKVCache(TurboQuant, Single):
    """Every token of a layer with full attention."""

    inner = KVCache


class BatchTurboQuantKVCache(TurboQuant, Batch):
    """The batch form of `TurboQuantKVCache`."""

    inner, single = BatchKVCache, TurboQuantKVCache


TurboQuantKVCache.batch = BatchTurboQuantKVCache


def type_name(dtype: mx.Dtype) -> str:
    """``bfloat16`` of `mx.bfloat16`. The type itself cannot be copied with a cache."""
    return str(dtype).rpartition(".")[2]
