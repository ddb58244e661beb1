"""The text of the kernels. The bodies are written once; a dialect is what their macros and primitives mean.

The kernel, per block: up to 8 query heads of one KV head over one split of the tokens.
Each warp takes 16 tokens at a time. Both products are tensor-core ones. Scores are
codes of keys times queries, as bytes, of which a query has two for 16 bits, and are
scaled once a group, since q . k = sum over groups of scale * (q . codes) + bias *
sum(q). Outputs are values times weights, as halves: of an affine layout codes times
probability times scale; of TurboQuant's, values looked up and scaled, still rotated,
times probability. A weight is two halves, so 22 bits of it count. Which dimension or
token goes to which row of a fragment is ours to choose, so each lane loads contiguous
codes and never exchanges any; but weights, which become an operand by a transposition.
Then the splits are merged, and what was rotated is rotated back: by a second kernel, or
by the last block of a head that comes to its end (`last.body`).

Dialects are CUDA, Metal, and the tests' plain C++. Metal's 8 x 8 matrices have PTX's
fragments for the left operand and the sum, once lanes are counted in another order; the
right one is transposed by shuffles. It has none of bytes: those go in as halves.

To CUDA's compiler the texts are given as files to include. mlx copies a kernel's source
at each call, and for these it would take longer than all the rest of a call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

_HERE = Path(__file__).parent


@cache
def text(name: str) -> str:
    """One of the files beside this module."""
    return (_HERE / name).read_text()


@cache
def header(dialect: str) -> str:
    """What goes before a kernel: for `mx.fast.cuda_kernel` that of "cuda", for `mx.fast.metal_kernel` that of "metal"."""
    parts = [f"{dialect}.inc", "common.inc"]
    both = "".join(_include(name) for name in parts) if dialect == "cuda" else "".join(map(text, parts))
    return f"{both}}}  // namespace decode_attention\nusing namespace decode_attention;\n"


@cache
def body(dialect: str, *names: str) -> str:
    """A kernel's body in a dialect, out of the files of these names."""
    if dialect == "metal":
        return "".join(map(text, ("metal.body", *names)))
    # mlx passes the shapes and strides that it finds in the text.
    used = sorted(set(re.findall(r"\b\w+_(?:shape|strides)\b", "".join(map(text, names)))))
    return f"// {' '.join(used)}\n{''.join(map(_include, names))}"


def _include(name: str) -> str:
    return f'#include "{_HERE / name}"\n'


@cache
def bounded(warps: int, resident: int) -> str:
    """CUDA's header with a bound on registers. mlx writes the kernel's signature itself, so the bound goes in by the keyword before it."""
    if not resident:
        return header("cuda")
    return f"{header('cuda')}#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({32 * warps}, {resident})\n"


TYPES = {
    "cuda": {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float"},
    "metal": {mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.float32: "float"},
}


def constants(named: Iterable[tuple[str, int | float | mx.Dtype]], types: Mapping[mx.Dtype, str]) -> str:
    """Of a kernel, at the head of its body. mlx has template arguments for this, which it would look at in each call."""
    lines = []
    for name, value in named:
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {types[value]};\n")
        else:
            lines.append(f"constexpr float {name} = {value!r}f;\n" if isinstance(value, float) else f"constexpr int {name} = {value};\n")
    return "".join(lines)


@cache
def kernel(
    dialect: str, names: tuple[str, ...], named: tuple[tuple[str, Any], ...], inputs: tuple[str, ...], outputs: tuple[str, ...], bounds: tuple[int, int] = (0, 0)
) -> Any:
    """mlx's, of the body in the files of these names. Views are read by their strides, so nothing is made contiguous."""
    make, before = (mx.fast.metal_kernel, header("metal")) if dialect == "metal" else (mx.fast.cuda_kernel, bounded(*bounds))
    whole = constants(named, TYPES[dialect]) + body(dialect, *names)
    # mlx keeps compiled kernels, on disk too, by name alone.
    name = f"tiered_{names[-1].partition('.')[0]}_{digest(dialect, before, whole)}"
    return make(name=name, input_names=list(inputs), output_names=list(outputs), header=before, source=whole, ensure_row_contiguous=False)


@cache
def digest(dialect: str, *texts: str) -> str:
    """Of a kernel's texts and of the files that they include."""
    names = (f"{dialect}.inc", "common.inc", *sorted(path.name for path in _HERE.glob("*.body")))
    return hashlib.sha256("\0".join([*texts, *map(text, names)]).encode()).hexdigest()[:16]
