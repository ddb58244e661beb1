"""The kernels' text as plain C++, compiled by the system's compiler and run over NumPy's view of the very arrays."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_tiered.kernels import source
from mlx_lm_tiered.kernels.decode import PLANES, Format, Options, inputs, merged, options, texts
from mlx_lm_tiered.kernels.layout import Layout
from mlx_lm_tiered.kernels.tuning import Tuning

TYPES = {mx.float32: "float", mx.bfloat16: "bf16", mx.float16: "half"}
POINTERS = {"q": "T", "kp": "u32", "vp": "u32", "kv": "u32", "book": "u32", "listed": "int", "lengths": "int", "mask": "bool", "done": "u32", "signs": "float"}


@dataclass(frozen=True)
class Shape:
    """What is compiled for: what `decode` is called with."""

    layout: Layout
    dim: int
    each: int = 4
    kv_heads: int = 2
    warps: int = 2
    scale: float = 0.11
    masked: bool = False
    queries: mx.Dtype = mx.float32
    scales: mx.Dtype = mx.float32
    records: bool = False
    block: int = 0

    @property
    def form(self) -> Format:
        return Format(self.layout, self.dim, self.each, self.queries, self.scales, self.scale, self.masked, self.records, self.block)

    def options(self, language: str, rows: int, splits: int) -> Options:
        return options(language, rows, self.kv_heads, self.form, Tuning(self.warps, splits))


def affine(bits: int, group_size: int, dim: int, **more: Any) -> Shape:
    return Shape(Layout.affine(bits, group_size), dim, **more)


def turbo(key_bits: int, value_bits: int, dim: int, **more: Any) -> Shape:
    return Shape(Layout.turboquant(key_bits, value_bits), dim, scales=mx.float16, **more)


def constants(named: dict[str, Any]) -> str:
    return source.constants(named.items(), TYPES)


def text(shapes: list[Shape]) -> str:
    """One translation unit with each shape's kernel, and where there is one that which merges."""
    out = ['#include "plain.inc"\n', source.text("common.inc"), "}\nusing namespace decode_attention;\n"]
    out.append("static struct { const void* in[10]; const long* strides[10]; const int* mask_shape; float* parts[3]; void* out; const float* signs; } args;\n")
    for number, s in enumerate(shapes):
        found = s.options("cuda", 1, 1)
        types = POINTERS | ({"vb": "u32"} if s.layout.turbo else {})
        out.append(f"static void parts_body_{number}() {{\n{constants(found.parts_constants)}")
        out += [
            f"const auto* {name} = (const {types.get(name, 'S')}*)args.in[{i}]; [[maybe_unused]] const long* {name}_strides = args.strides[{i}];\n"
            for i, name in enumerate(inputs("cuda", s.form))
        ]
        if merged("cuda", s.form):
            out.append("const int* mask_shape = args.mask_shape; float* parts = args.parts[0]; T* out = (T*)args.out;\n")
        else:
            out.append("const int* mask_shape = args.mask_shape; float *po = args.parts[0], *pm = args.parts[1], *pl = args.parts[2];\n")
        out.append("".join(map(source.text, texts("cuda", s.form))))
        out.append(f"}}\nstatic void merge_body_{number}() {{\n{constants(found.merge_constants)}T* out = (T*)args.out;\n")
        out.append("const int po_shape[] = {0, args.mask_shape[0]}; const float *po = args.parts[0], *pm = args.parts[1], *pl = args.parts[2], *signs = args.signs;\n")
        out.append(f"{source.text('merge.body')}{source.text('unrotated.body' if s.layout.turbo else 'written.body')}}}\n")
    out.append('extern "C" bool run(int which, int merge, const void** in, const long** strides, const int* mask_shape, float** parts, const float* signs, void* out,')
    out.append(" const int* grid, int threads) {\nstatic void (*bodies[])() = {")
    out += [f"parts_body_{number}, merge_body_{number}, " for number in range(len(shapes))]
    out.append("""};
for (int i = 0; i < 10; ++i) { args.in[i] = in[i]; args.strides[i] = strides[i]; }
for (int i = 0; i < 3; ++i) args.parts[i] = parts[i];
args.mask_shape = mask_shape; args.signs = signs; args.out = out;
return fibers::run_grid(bodies[2 * which + merge], grid, threads);
}
""")
    return "".join(out)


def compiled(text: str, directory: Path) -> Any:
    """A library with a text's `run`, which returns a bool."""
    (directory / "plain.cpp").write_text(text)
    command = ["c++", "-std=c++17", "-O0", "-fno-strict-aliasing", f"-I{Path(__file__).parent}", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "plain.cpp", "-o", "plain.so"]
    done = subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(directory / "plain.so"))
    library.run.restype = ctypes.c_bool
    return library


class Library:
    """The shapes' kernels, compiled into `directory`."""

    def __init__(self, shapes: list[Shape], directory: Path):
        self._numbers = {shape: number for number, shape in enumerate(shapes)}
        self._run = compiled(text(shapes), directory).run

    def decode(self, shape: Shape, q: mx.array, keys: Any, values: Any, slots: int, mask: np.ndarray | None, splits: int) -> np.ndarray:
        """As `kernels.decode.decode`, over whole buffers of which `slots` are held, or over records of them; in fp32."""
        named = dict(zip(PLANES, shape.layout.inputs(keys, values), strict=True))
        if shape.records:
            named |= {"kv": shape.form.record.join(list(zip(keys, values, strict=True))), "book": named["vb"]}
        return self._decode(shape, q, named, slots, mask, splits)

    def decode_listed(self, shape: Shape, q: mx.array, held: mx.array, table: mx.array, lengths: mx.array, splits: int) -> np.ndarray:
        """As `kernels.decode.decode_listed`."""
        book = shape.layout.inputs((held, held), (held, held))[-1]
        return self._decode(shape, q, {"kv": held, "book": book, "listed": table, "lengths": lengths}, 0, None, splits)

    def _decode(self, shape: Shape, q: mx.array, named: dict[str, mx.array], slots: int, mask: np.ndarray | None, splits: int) -> np.ndarray:
        rows, form, alone = q.shape[0], shape.form, merged("cuda", shape.form)
        found = shape.options("cuda", rows, splits)
        given = {name: _view(array) for name, array in (named | {"q": q}).items()}
        given |= {"signs": _view(signs) for signs in shape.layout.back(shape.dim)}
        given["mask"] = np.ones((1, 1, 1, 1), bool) if mask is None else mask
        done = given["done"] = np.zeros(rows * shape.kv_heads * -(-shape.each // 8), np.uint32)
        arrays = [given[name] for name in inputs("cuda", form)]
        strides = [(ctypes.c_long * 4)(*(s // a.itemsize for s in a.strides)) for a in arrays]
        sizes = [(found.parts["output_shapes"][1]), (1,), (1,)] if alone else found.parts["output_shapes"]
        parts = [np.full(size, np.nan, np.float32) for size in sizes]
        signs = given.get("signs", parts[0])
        out = np.zeros(q.shape, np.uint16 if shape.queries == mx.bfloat16 else np.float16 if shape.queries == mx.float16 else np.float32)

        def call(merge: int, first: int, grid: tuple[int, ...], threads: int) -> None:
            dims, (width, *others) = (ctypes.c_int * 4)(first, 0, 0, slots), grid
            assert self._run(
                self._numbers[shape], merge, (ctypes.c_void_p * 10)(*(a.ctypes.data for a in arrays)),
                (ctypes.POINTER(ctypes.c_long) * 10)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_long)) for s in strides)), dims,
                (ctypes.c_void_p * 3)(*(p.ctypes.data for p in parts)), ctypes.c_void_p(signs.ctypes.data), ctypes.c_void_p(out.ctypes.data),
                (ctypes.c_int * 3)(width // threads, *others), threads,
            )  # fmt: skip

        for merge, one in enumerate((found.parts,) if alone else (found.parts, found.merge)):
            call(merge, splits * merge, one["grid"], one["threadgroup"][0])
        # Ready for the next call.
        assert not done.any()
        return (out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out.astype(np.float32)


def _view(array: mx.array) -> np.ndarray:
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
