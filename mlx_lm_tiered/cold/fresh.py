"""New memory to read into, without filling it first: touching fresh memory costs as much as the read from a warm page cache.

mlx has no call for an array without values, but it lets the one who answers its
reads fill the memory (`mx.load` from a file-like object): `_Unread` answers without
writing anything.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import mmap
import sys
import time
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

HUGE = 4 << 20  # bytes from which on memory is asked for in huge pages, as numpy does for its own arrays
_HUGE_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_LETTING_GO = 5.0  # seconds, the longest that the end of the process is held up
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fresh(shape: tuple[int, ...], dtype: mx.Dtype, filled: bool = False) -> mx.array:
    """A new evaluated array. What it holds is not defined, like C's ``malloc``; write all of it before anything reads it.

    Any thread but the generation thread must have it `filled`: whoever answers mlx's
    reads needs the interpreter, and the generation thread keeps that while it waits for
    all of mlx's streams (``mx.clear_cache``, which upstream calls after each chunk of a
    prefill), so both would wait for ever.
    """
    if filled or not leaves_unfilled():
        array = mx.zeros(shape, dtype=dtype, stream=mx.cpu)
    else:
        array = _unfilled(shape, dtype.size)
        if array.dtype != dtype:
            array = array.view(dtype, stream=mx.cpu)
    mx.eval(array)
    return array


def ask_for_huge_pages(arrays: Sequence[np.ndarray]) -> None:
    """Ask the system to back the memory of new arrays with huge pages: a thousand page faults become two. Linux only; elsewhere it does nothing.

    To be called when all are made and none is filled. What lies side by side is asked
    for together, so that huge pages may lie across; and where the allocator has
    written its notes already, so that a small page is there, that one is replaced.
    """
    if sum(array.nbytes for array in arrays) < HUGE or (advise := _advise()) is None:
        return
    for start, end in _joined(sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays)):
        start, end = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if end - start < HUGE:
            continue
        # Only advice: a refusal changes nothing.
        _call(advise, start, end - start, mmap.MADV_HUGEPAGE)
        for place in {array.ctypes.data // _HUGE_PAGE * _HUGE_PAGE for array in arrays}:
            if start <= place and place + _HUGE_PAGE <= end:
                _call(advise, place, _HUGE_PAGE, _COLLAPSE)


def _call(advise: Any, start: int, size: int, advice: int) -> None:
    advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))


def _joined(areas: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Areas of memory in order, with those joined that less than a page is between."""
    joined: list[tuple[int, int]] = []
    for start, end in areas:
        if joined and start - joined[-1][1] < mmap.PAGESIZE:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


class _Unread:
    """A file in numpy's format as `mx.load` sees it, whose body is what the memory held before."""

    closed = False

    def __init__(self, shape: tuple[int, ...], itemsize: int):
        head = io.BytesIO()
        kind = f"{'|' if itemsize == 1 else '<'}u{itemsize}"
        np.lib.format.write_array_header_1_0(head, {"descr": kind, "fortran_order": False, "shape": shape})
        self._head = head.getvalue()
        self._size = len(self._head) + itemsize * int(np.prod(shape, dtype=np.int64))
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = len(self._head) if size < 0 else self._at + size
        data = self._head[self._at : end]
        self._at += len(data)
        return data

    def readinto(self, memory: Any) -> int:
        data = self._head[self._at : self._at + len(memory)]
        memory[: len(data)] = data
        count = min(len(memory), self._size - self._at)
        self._at += count
        return count


# Those that mlx may still hold. Without callbacks: one would be bytecode on mlx's thread, which can lose the interpreter there.
_readers: list[weakref.ref[_Unread]] = []


def _unfilled(shape: tuple[int, ...], itemsize: int) -> mx.array:
    reader = _Unread(shape, itemsize)
    _readers[:] = [*(one for one in _readers if one() is not None), weakref.ref(reader)]
    # On the processor's stream: a GPU's would take the memory over and copy it.
    array = mx.load(reader, format="npy", stream=mx.cpu)  # type: ignore[arg-type]
    if not isinstance(array, mx.array) or array.shape != shape or array.dtype != _UNSIGNED[itemsize]:
        raise TypeError("mx.load made something else of a file in numpy's format")
    return array


@atexit.register
def _let_go() -> None:
    """Wait until mlx has let go of all that answered its reads.

    A thread of mlx's does that a moment after the read, and asks for the interpreter.
    Once that is being finalized whoever asks is ended, inside a C++ destructor, which
    aborts the process (backtrace: the task of ``Load::eval_cpu``, mlx 0.32.4).
    """
    until = time.monotonic() + _LETTING_GO
    while any(one() is not None for one in _readers) and time.monotonic() < until:
        time.sleep(0.001)


@cache
def leaves_unfilled() -> bool:
    """Whether this mlx takes memory for `mx.load` as we expect: tried once. On CUDA memory is not the processor's own, and nobody has tried."""
    if _cuda():
        return False
    try:
        mx.eval(_unfilled((3, 5), 2))
    except Exception:  # whatever another mlx raises: then memory is filled with zeros first
        return False
    return True


@cache
def _advise() -> Any:
    """The system's ``madvise``; None where there is none that knows huge pages."""
    if sys.platform != "linux" or _cuda() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None


def _cuda() -> bool:
    return hasattr(mx, "cuda") and mx.cuda.is_available()
