"""Reading GGUF files: metadata, and tensors as float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block layouts
as in ggml's ``ggml-common.h``. Only the tensor types in `BLOCKS` are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

# GGUF value type -> struct code; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is not GGUF, or holds what is not read here; the text is one sentence."""


@dataclass(frozen=True)
class Tensor:
    """One tensor: its shape in numpy's order, and a function that loads it as float32."""

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors by name) of a GGUF file; tensors are mapped, not loaded. Raises GGUFError, OSError."""
    data = np.memmap(path, mode="r")
    if bytes(data[:4]) != b"GGUF":
        raise GGUFError(f"{path} is not a GGUF file")
    reader = _Reader(memoryview(data))
    version = reader.scalar("I")
    if version not in (2, 3):
        raise GGUFError(f"{path} has GGUF version {version}; 2 and 3 are read")
    tensor_count, pair_count = reader.scalar("Q"), reader.scalar("Q")
    meta: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.string()
        meta[key] = reader.value(reader.scalar("I"))
    infos = [reader.tensor_info() for _ in range(tensor_count)]
    alignment = meta.get("general.alignment", 32)
    base = -(-reader.at // alignment) * alignment
    return meta, {name: _tensor(data, base + offset, name, shape, kind) for name, shape, kind, offset in infos}


class _Reader:
    """The header, read front to back; `at` is the offset of the next byte."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 4

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(count)]
        return self.scalar(_SCALARS[kind])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        # GGUF gives the fastest dimension first, numpy last.
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """32 values: scale, least value, 16 bytes with the first half in the low nibbles."""
    packed = blocks[:, 4:]
    quants = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)
    return _half(blocks, 0) * quants + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """32 values: scale, 32 signed bytes."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


# ggml tensor type -> (values in a block, bytes in a block, blocks as bytes -> float32)
BLOCKS: Mapping[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (1, 4, lambda blocks: blocks.view(np.float32)),  # F32
    1: (1, 2, lambda blocks: blocks.view(np.float16).astype(np.float32)),  # F16
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}


def _tensor(data: np.ndarray, start: int, name: str, shape: tuple[int, ...], kind: int) -> Tensor:
    if kind not in BLOCKS:
        raise GGUFError(f"tensor {name} has ggml type {kind}, which is not read here")
    values, size, dequantize = BLOCKS[kind]
    count = int(np.prod(shape)) // values

    def load() -> np.ndarray:
        blocks = np.array(data[start : start + count * size]).reshape(count, size)
        return dequantize(blocks).reshape(shape)

    return Tensor(shape, load)
