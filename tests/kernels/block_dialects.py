"""`blocks.body` in the dialects that run here: as plain C++, and as the Metal text that mlx writes, against the stand-in of `shim/`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import metal
import mlx.core as mx
import numpy as np
import plain

from mlx_lm_tiered.kernels import blocks, source
from mlx_lm_tiered.kernels.blocks import INPUTS, Form
from mlx_lm_tiered.kernels.tuning import Tuning

KV_HEADS = 2
PARTS = ["po", "pm", "pl"]


def options(language: str, form: Form, rows: int, splits: int, warps: int = 2) -> blocks.Options:
    return blocks.options(language, rows, KV_HEADS, form, Tuning(warps, splits))


class Plain:
    """The forms' kernels, compiled into `directory`."""

    def __init__(self, forms: Sequence[Form], directory: Path):
        self._numbers = {form: number for number, form in enumerate(forms)}
        self._run = plain.compiled(_text(forms), directory).run

    def decode(self, form: Form, q: mx.array, keys: mx.array, values: mx.array, table: np.ndarray, lengths: np.ndarray, splits: int) -> np.ndarray:
        """As `kernels.blocks.decode`, in fp32."""
        found = options("cuda", form, q.shape[0], splits)
        alone, units = blocks.merged("cuda", form), q.shape[0] * KV_HEADS * -(-form.shared // blocks.queries_of_a_block(form))
        done = np.zeros(units, np.uint32)
        arrays = [*map(metal._view, (q, keys, values)), table, lengths, done]
        strides = [(ctypes.c_long * 4)(*(s // a.itemsize for s in a.strides)) for a in arrays]
        parts, out = empty(found, q)
        shape = (ctypes.c_int * 2)(*table.shape)
        for merge, one in enumerate((found.parts,) if alone else (found.parts, found.merge)):
            threads, (width, *others) = one["threadgroup"][0], one["grid"]
            assert self._run(
                self._numbers[form], merge, (ctypes.c_void_p * 6)(*(a.ctypes.data for a in arrays)),
                (ctypes.POINTER(ctypes.c_long) * 6)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_long)) for s in strides)), shape, splits,
                (ctypes.c_void_p * 3)(*(p.ctypes.data for p in parts)), ctypes.c_void_p(out.ctypes.data), (ctypes.c_int * 3)(width // threads, *others), threads,
            ), "some threads wait for others that went another way"  # fmt: skip
        # Ready for the next call.
        assert not done.any()
        return floats(out)


def _text(forms: Sequence[Form]) -> str:
    """One translation unit with both kernels of each form."""
    out = ['#include "plain.inc"\n', source.text("common.inc"), "}\nusing namespace decode_attention;\n"]
    out.append("static struct { const void* in[6]; const long* strides[6]; const int* table_shape; int splits; float* parts[3]; void* out; } args;\n")
    for number, form in enumerate(forms):
        found = options("cuda", form, 1, 1)
        out.append(f"static void parts_{number}() {{\n{plain.constants(found.parts_constants)}")
        for i, name in enumerate((*INPUTS, "done")):
            kind = "u32" if i > 4 else "int" if i > 2 else "S"
            out.append(f"const auto* {name} = (const {kind}*)args.in[{i}]; const long* {name}_strides = args.strides[{i}];\n")
        if blocks.merged("cuda", form):
            out.append("const int* table_shape = args.table_shape; float* parts = args.parts[0]; T* out = (T*)args.out;\n")
        else:
            out.append("const int* table_shape = args.table_shape; float *po = args.parts[0], *pm = args.parts[1], *pl = args.parts[2];\n")
        out.append("".join(map(source.text, blocks.texts("cuda", form))))
        out.append(f"}}\nstatic void merge_{number}() {{\n{plain.constants(found.merge_constants)}T* out = (T*)args.out;\n")
        out.append("const int po_shape[] = {0, args.splits}; const float *po = args.parts[0], *pm = args.parts[1], *pl = args.parts[2];\n")
        out.append(f"{source.text('merge.body')}{source.text('written.body')}}}\n")
    out.append('extern "C" bool run(int which, int merge, const void** in, const long** strides, const int* table_shape, int splits, float** parts, void* out,')
    out.append(" const int* grid, int threads) {\nstatic void (*bodies[])() = {")
    out += [f"parts_{number}, merge_{number}, " for number in range(len(forms))]
    out.append("""};
for (int i = 0; i < 6; ++i) { args.in[i] = in[i]; args.strides[i] = strides[i]; }
for (int i = 0; i < 3; ++i) args.parts[i] = parts[i];
args.table_shape = table_shape; args.splits = splits; args.out = out;
return fibers::run_grid(bodies[2 * which + merge], grid, threads);
}
""")
    return "".join(out)


def written(form: Form, rows: int = 1, splits: int = 8, room: int = 8) -> tuple[metal.Kernel, metal.Kernel]:
    """Both kernels as mlx writes them for Metal."""
    header, found = source.header("metal"), options("metal", form, rows, splits)
    first, second = blocks.kernels("metal", form, found)
    arena = mx.zeros((1, KV_HEADS, 4 * form.block, form.dim) if form.heads_first else (4, KV_HEADS, form.block, form.dim), form.dtype)
    q = mx.zeros((rows, KV_HEADS * form.each, form.length, form.dim), form.dtype)
    inputs = [q, arena, arena, mx.zeros((rows, room), mx.int32), mx.zeros((max(rows, 8),), mx.int32)]
    parts = [mx.zeros(size) for size in found.parts["output_shapes"]]
    return metal.written(first, found.parts, inputs, header), metal.written(second, found.merge, parts, header)


class Metal:
    """The same of Metal's text."""

    def __init__(self, forms: Sequence[Form], directory: Path):
        self._numbers = {form: 2 * number for number, form in enumerate(forms)}
        self._kernels = [kernel for form in forms for kernel in written(form)]
        self._library = metal.linked(self._kernels, directory)

    def decode(self, form: Form, q: mx.array, keys: mx.array, values: mx.array, table: np.ndarray, lengths: np.ndarray, splits: int) -> np.ndarray:
        """As `kernels.blocks.decode`, in fp32."""
        found = options("metal", form, q.shape[0], splits)
        parts, out = empty(found, q)
        given: list[Any] = [*map(metal._view, (q, keys, values)), table, lengths, *parts, out]
        arrays = dict(zip([*INPUTS, *PARTS, "out"], given, strict=True))
        for which, one in enumerate((found.parts, found.merge)):
            threads, (width, *others) = one["threadgroup"][0], one["grid"]
            number = self._numbers[form] + which
            metal.call(self._library, self._kernels[number], number, arrays, {}, (width // threads, *others), threads)
        return floats(out)


def empty(found: blocks.Options, q: mx.array) -> tuple[list[np.ndarray], np.ndarray]:
    """Parts and output that nobody has written."""
    kind = np.uint16 if q.dtype == mx.bfloat16 else np.float16 if q.dtype == mx.float16 else np.float32
    sizes = [size for size in found.parts["output_shapes"] if size != q.shape]
    return [np.full(size, np.nan, np.float32) for size in (sizes * 3)[:3]], np.zeros(q.shape, kind)


def floats(out: np.ndarray) -> np.ndarray:
    return (out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out.astype(np.float32)
