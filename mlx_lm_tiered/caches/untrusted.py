"""Reading fields and arrays that came from a file: every value is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

# mlx's shapes are int32.
LARGEST = 2**31 - 1
FLOATS = (mx.float16, mx.bfloat16, mx.float32)
INDICES = (mx.int32, mx.int64)


class Reader:
    """Takes the fields and arrays of one dumped cache, each once. Everything raises ValueError.

    Keys and values are of the types in `elements`.
    """

    def __init__(self, kind: str, fields: Any, arrays: Mapping[str, mx.array], elements: tuple[mx.Dtype, ...] = FLOATS):
        self.kind = kind
        self._elements = elements
        if not isinstance(fields, dict):
            raise self.fault("fields are not an object")
        self._fields = dict(fields)
        self._arrays = dict(arrays)

    def fault(self, text: str) -> ValueError:
        return ValueError(f"cache of kind {self.kind}: {text}")

    def value(self, name: str) -> Any:
        if name not in self._fields:
            raise self.fault(f"field {name} is missing")
        return self._fields.pop(name)

    def integer(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        value = self.value(name)
        if type(value) is not int or not low <= value <= high:
            raise self.fault(f"field {name} is not an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int = 0, high: int = LARGEST) -> int | None:
        if self._fields.get(name, 0) is None:
            return self.value(name)
        return self.integer(name, low, high)

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if type(value) is not bool:
            raise self.fault(f"field {name} is not true or false")
        return value

    def flags(self, name: str) -> list[bool]:
        value = self.value(name)
        if not isinstance(value, list) or any(type(v) is not bool for v in value):
            raise self.fault(f"field {name} is not a list of true and false")
        return value

    def has(self, name: str) -> bool:
        return name in self._arrays

    def array(self, name: str, ndim: int | None = None, dtypes: tuple[mx.Dtype, ...] | None = None) -> mx.array:
        array = self._arrays.pop(name, None)
        if not isinstance(array, mx.array):
            raise self.fault(f"tensor {name} is missing")
        if ndim is None and array.ndim == 0 or ndim is not None and array.ndim != ndim:
            raise self.fault(f"tensor {name} has {array.ndim} dimensions")
        if dtypes is not None and array.dtype not in dtypes:
            raise self.fault(f"tensor {name} has dtype {array.dtype}")
        return array

    def optional_array(
        self, name: str, ndim: int | None = None, dtypes: tuple[mx.Dtype, ...] | None = None
    ) -> mx.array | None:
        return self.array(name, ndim, dtypes) if name in self._arrays else None

    def keys_and_values(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Two arrays (batch, heads, slots, dim) with the same first three, `tokens` slots or more."""
        keys, values = self.array("keys", 4, self._elements), self.array("values", 4, self._elements)
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise self.fault("keys and values do not belong together")
        if 0 in keys.shape[:2]:
            raise self.fault("keys have no rows or heads")
        if keys.shape[2] < tokens:
            raise self.fault(f"{keys.shape[2]} slots cannot hold {tokens} tokens")
        return keys, values

    def end(self) -> None:
        """Nothing may be left over."""
        for name in [*self._fields, *self._arrays]:
            raise self.fault(f"{str(name)[:40]} does not belong here")
