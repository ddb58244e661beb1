"""Between mlx arrays and bytes. Generation thread only, but for `Landing` up to `finish`: an evaluated array is no more than a buffer.

Where memory is shared (CPU, Metal), numpy can look straight into an evaluated
array's buffer: reading a file into that view fills the array, and writing from it
copies nothing. On CUDA the buffer may live on the device, so a copy goes through
numpy there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..caches import Later
from .files import PIECE
from .fresh import fresh
from .meta import DTYPES, TensorSpec

STEP = 256  # tokens by which upstream's caches grow (`KVCache.step`)
# Of a restore beside decoding: a small part of a step, even where a token takes 2 ms. What has much
# to read comes from a model that takes longer, and each piece is a turn of the interpreter, too.
LEAST_BESIDE, MOST_BESIDE = 256 << 10, 2 << 20
PIECES_BESIDE = 64
MAX_RUNS = 512  # of one vectored read; systems allow 1024
# Room for growth in one entry. Real entries stay far below; a hostile header could ask for a thousandfold of its file.
MAX_ROOM = 4 << 30

MLX_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32, "I32": mx.int32,
    "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "F64": mx.float64,
    "C64": mx.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in MLX_DTYPES.items()}


def spec_of(name: str, array: mx.array | Later, grow_axis: int | None) -> TensorSpec:
    """The spec under which an array is stored."""
    return TensorSpec(name, _NAMES[array.dtype], tuple(array.shape), grow_axis)


def to_bytes(array: mx.array) -> memoryview:
    """An array's elements in row-major order. The view keeps the buffer alive, and may share it: read only."""
    if array.size == 0:
        return memoryview(b"")  # mlx 0.32.4 on CUDA crashes when numpy looks into a slice without elements
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)  # numpy has no bfloat16
    mx.eval(array)
    view = np.array(array, copy=None if shared_memory() else True)
    return memoryview(np.ascontiguousarray(view).reshape(-1).view(np.uint8)).toreadonly()


def capacities(specs: tuple[TensorSpec, ...]) -> list[tuple[int, ...]]:
    """The shapes in which tensors are restored: at least one step of room along the grow axis, so that the next tokens are written in place."""
    shapes, room = [], 0
    for spec in specs:
        shape = list(spec.shape)
        if spec.grow_axis is not None and spec.nbytes > 0:
            shape[spec.grow_axis] = (shape[spec.grow_axis] // STEP + 2) * STEP
            room += math.prod(shape) * DTYPES[spec.dtype] - spec.nbytes
        shapes.append(tuple(shape))
    return shapes if room <= MAX_ROOM else [spec.shape for spec in specs]


def piece_beside(nbytes: int) -> int:
    """Bytes to read at once beside decoding, of an entry of so many."""
    return max(LEAST_BESIDE, min(MOST_BESIDE, nbytes // PIECES_BESIDE))


class Landing:
    """A new array of `shape`, with room for `spec`, and the places where files' bytes go in it.

    Made and finished on the generation thread, or as `filled` memory made on any one;
    written to on any one, about `piece` bytes at once.
    """

    def __init__(self, spec: TensorSpec, shape: tuple[int, ...], piece: int | None = None, filled: bool = False):
        self._spec = spec
        self._piece = PIECE if piece is None else piece
        self._array: mx.array | None = None
        dtype = MLX_DTYPES[spec.dtype]
        if shared_memory():
            self._array = fresh(shape, dtype, filled)
            view = np.array(self._array.view(mx.uint16, stream=mx.cpu) if dtype == mx.bfloat16 else self._array, copy=False)
            if not (view.flags.writeable and view.flags.c_contiguous):
                raise RuntimeError("mlx no longer lends its buffers to numpy")
        else:
            view = np.empty(shape, dtype=_numpy_dtype(spec.dtype))
        self._view = view

    @property
    def memory(self) -> np.ndarray:
        """Where the array is until it is finished."""
        return self._view

    def runs(self, start: int = 0, stop: int | None = None, beyond: int = 0) -> Iterator[list[memoryview]]:
        """Where a file's bytes go, in order: lists of writable pieces of memory, each list about as many bytes as are read at once.

        The file holds the tokens from `start` to `stop` along the grow axis, and
        `beyond` more, which go nowhere. The file that holds the last tokens (`stop` is
        None) has the room behind them cleared, too.
        """
        spec = self._spec
        if spec.nbytes == 0:
            return
        axis = spec.grow_axis if spec.grow_axis is not None else 0
        shape = self._view.shape or (1,)
        lengths = spec.shape or (1,)
        inner = math.prod(shape[axis + 1 :]) * self._view.itemsize
        rows = self._view.reshape(math.prod(shape[:axis]), -1).view(np.uint8)
        first, last = start * inner, (lengths[axis] if stop is None else stop) * inner
        most = self._piece
        scratch = np.empty(min(most, beyond * inner), np.uint8)
        batch: list[memoryview] = []
        size = 0
        for row in rows:
            if stop is None:
                # As upstream's caches have it: the memory may hold anything, and 0 times NaN is NaN. Row by
                # row, as the first touch of new memory clears it, and what was just cleared is still in a cache.
                row[last:] = 0
            pieces = [row[at : min(at + most, last)] for at in range(first, last, most)]
            pieces += [scratch[: min(most, beyond * inner - at)] for at in range(0, beyond * inner, most)]
            for piece in map(memoryview, pieces):  # type: ignore[arg-type, var-annotated]
                batch.append(piece)
                size += len(piece)
                # Pieces of the scratch may not be hashed after they were overwritten.
                if size >= most or len(batch) == MAX_RUNS or beyond:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def finish(self) -> mx.array:
        """The filled array."""
        if self._array is None:
            self._array = mx.array(self._view).view(MLX_DTYPES[self._spec.dtype])
            mx.eval(self._array)
        del self._view
        return self._array


def _numpy_dtype(name: str) -> Any:
    """What to carry a dtype's bytes in: integers of its width, which mlx takes over as they are."""
    return np.bool_ if name == "BOOL" else np.dtype(f"u{DTYPES[name]}")


@cache
def shared_memory() -> bool:
    """Whether what numpy writes into an mlx buffer is what mlx then computes with: tried once, with a large and a small buffer.

    True on CPUs and on Metal, whose memory is the processor's own, and with mlx for
    CUDA, which gives out managed memory to those who look (seen with 0.32.4 on an H200).
    """
    for size in (1 << 10, 1 << 22):
        array = mx.zeros(size, dtype=mx.uint16)
        mx.eval(array)
        view = np.array(array, copy=False)
        if not (view.flags.writeable and view.flags.c_contiguous and np.shares_memory(view, np.array(array, copy=False))):
            return False
        view[:] = 7
        del view
        if mx.any(array != 7).item():
            return False
    return True
