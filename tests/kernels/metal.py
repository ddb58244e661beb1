"""The kernels' Metal text, signature and all, as mlx would hand it to Metal: compiled by clang against the stand-in of `shim/`, and run.

mlx without Metal cannot run a Metal kernel, but it can record one for export, and writes
the text of it then.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from plain import Shape

from mlx_lm_tiered.kernels import decode, source

HERE = Path(__file__).parent
# Metal has C++14 and a little more; every other warning is an error.
OPTIONS = ["-std=c++14", "-Wall", "-Werror", "-Wno-c++17-extensions", "-Wno-unknown-attributes", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unused-command-line-argument"]
PARAMETER = re.compile(r"^  (?P<type>(?:const )?(?:device|constant) \w+\*) (?P<name>\w+) \[\[buffer\((?P<index>\d+)\)\]\]", re.MULTILINE)
ATTRIBUTE = re.compile(r"^  uint3? (\w+) \[\[\1\]\]", re.MULTILINE)


class Kernel(NamedTuple):
    """One that mlx wrote."""

    header: str
    text: str  # with mlx's signature
    name: str
    buffers: list[tuple[str, str]]  # the type and name of each
    attributes: list[str]


def written(kernel: Any, options: dict[str, Any], inputs: Sequence[mx.array], header: str) -> Kernel:
    """What mlx makes of a `mx.fast.metal_kernel` for these inputs."""

    def call(*given: mx.array) -> list[mx.array]:
        return kernel(inputs=list(given), verbose=True, **options)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            mx.export_function(os.path.join(folder, "call.mlxfn"), call, *inputs)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        out.seek(0)
        text = out.read().decode().split("```\n")[1]
    assert text.startswith(header)
    text = text[len(header) :]
    name = re.search(r"\[\[kernel\]\] void (\w+)\(", text)
    assert name
    parameters = list(PARAMETER.finditer(text))
    assert [int(p["index"]) for p in parameters] == list(range(len(parameters)))
    return Kernel(header, text, name[1], [(p["type"], p["name"]) for p in parameters], ATTRIBUTE.findall(text))


def of(shape: Shape, slots: int = 16, splits: int = 8) -> tuple[Kernel, Kernel]:
    """Both kernels of a shape."""
    rows, header, layout = 1, source.header("metal"), shape.layout
    found = shape.options("metal", rows, splits)
    first, second = decode.kernels("metal", shape.form, found)

    def zeros(width: int, kind: mx.Dtype) -> mx.array:
        return mx.zeros((rows, shape.kv_heads, slots, width), kind)

    groups = shape.dim // layout.group_size
    sides = []
    for bits, scales in ((layout.key_bits, 2), (layout.value_bits, 1)):
        packed = zeros(shape.dim * bits // 32, mx.uint32)
        sides.append([packed, zeros(groups * scales, shape.scales)] if layout.turbo else [packed, *[zeros(groups, shape.scales)] * 2])
    mask = mx.zeros((rows, 1, 1, slots), mx.bool_)
    inputs = [mx.zeros((rows, shape.each * shape.kv_heads, 1, shape.dim), shape.queries), *layout.inputs(*sides), mask]
    parts = [*(mx.zeros(size) for size in found.parts["output_shapes"]), *layout.back(shape.dim)]
    return written(first, found.parts, inputs, header), written(second, found.merge, parts, header)


def unit(kernels: list[Kernel]) -> str:
    """One translation unit of them, with `run(which, buffers, grid, threads)`."""
    out = [kernels[0].header, *dict.fromkeys(kernel.text for kernel in kernels), "static void* const* buffers;\n"]
    for number, kernel in enumerate(kernels):
        arguments = [f"({kind})(unsigned long)buffers[{i}]" for i, (kind, _) in enumerate(kernel.buffers)]
        arguments += [f"attributes::{name}()" for name in kernel.attributes]
        out.append(f"static void run_{number}() {{ {kernel.name}({', '.join(arguments)}); }}\n")
    out.append("static void (*const all[])() = {" + ", ".join(f"run_{number}" for number in range(len(kernels))) + "};\n")
    out.append('extern "C" bool run(int which, void* const* given, const int* grid, int threads) {\n')
    out.append("  buffers = given;\n  return fibers::run_grid(all[which], grid, threads);\n}\n")
    return "".join(out)


def compiled(text: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """clang's result for a text, as `metal.o` where it is a right one. The clang is ziglang's, which is the same on every machine."""
    (directory / "metal.cpp").write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{text}")
    command = [sys.executable, "-m", "ziglang", "c++", *OPTIONS, f"-I{HERE / 'shim'}", "-O0", "-fPIC", "-fno-sanitize=undefined", "-U_FORTIFY_SOURCE"]
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(directory / "cache")}
    return subprocess.run([*command, *more, "-c", "metal.cpp", "-o", "metal.o"], check=False, cwd=directory, capture_output=True, text=True, env=environment)


def linked(kernels: list[Kernel], directory: Path) -> Any:
    """A library with all of them."""
    done = compiled(unit(kernels), directory)
    assert done.returncode == 0, done.stderr
    made = subprocess.run(["c++", "-shared", "metal.o", "-o", "metal.so"], check=False, cwd=directory, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    library = ctypes.CDLL(str(directory / "metal.so"))
    library.run.restype = ctypes.c_bool
    return library


def call(library: Any, kernel: Kernel, which: int, arrays: dict[str, np.ndarray], shapes: dict[str, Any], grid: tuple[int, int, int], threads: int) -> None:
    """Run one of a library. `shapes` are those of the arrays as the kernel sees them, where they are not the arrays' own."""
    given: list[np.ndarray] = []
    for _, name in kernel.buffers:
        array, _, what = name.partition("_")
        if what == "shape":
            given.append(np.array(shapes.get(array, arrays[array].shape), np.int32))
        elif what == "strides":
            given.append(np.array([s // arrays[array].itemsize for s in arrays[array].strides], np.int64))
        else:
            given.append(arrays[array])
    pointers = (ctypes.c_void_p * len(given))(*(a.ctypes.data for a in given))
    assert library.run(which, pointers, (ctypes.c_int * 3)(*grid), threads), "some threads wait for others that went another way"


class Library:
    """The shapes' kernels, compiled into `directory`. As `plain.Library`."""

    def __init__(self, shapes: list[Shape], directory: Path):
        self._numbers = {shape: 2 * number for number, shape in enumerate(shapes)}
        self._kernels = [kernel for shape in shapes for kernel in of(shape)]
        self._library = linked(self._kernels, directory)

    def decode(self, shape: Shape, q: mx.array, keys: Any, values: Any, slots: int, mask: np.ndarray | None, splits: int) -> np.ndarray:
        """As `kernels.decode.decode`, over whole buffers of which `slots` are held; in fp32."""
        rows = q.shape[0]
        found = shape.options("metal", rows, splits)
        mask = np.ones((1, 1, 1, 1), bool) if mask is None else mask
        parts = [np.full(size, np.nan, np.float32) for size in found.parts["output_shapes"]]
        out = np.zeros(q.shape, np.uint16 if shape.queries == mx.bfloat16 else np.float16 if shape.queries == mx.float16 else np.float32)
        given = [_view(a) for a in (q, *shape.layout.inputs(keys, values))] + [mask, *parts, out]
        arrays = dict(zip([*decode.inputs("metal", shape.form), "po", "pm", "pl", "out"], given, strict=True))
        arrays |= {"signs": _view(signs) for signs in shape.layout.back(shape.dim)}
        seen = {"mask": (1, 1, 1, slots)}
        for which, one in enumerate((found.parts, found.merge)):
            threads = one["threadgroup"][0]
            width, *others = one["grid"]
            number = self._numbers[shape] + which
            call(self._library, self._kernels[number], number, arrays, {} if which else seen, (width // threads, *others), threads)
        return (out.astype(np.uint32) << 16).view(np.float32) if out.dtype == np.uint16 else out.astype(np.float32)


def _view(array: mx.array) -> np.ndarray:
    """A copy where a GPU's buffers begin: at a multiple of what a load of 16 bytes asks for, which on a CPU mlx's do not."""
    values = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    found = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    found[:] = values
    return found
