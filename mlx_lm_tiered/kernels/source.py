"""The text of the kernels. `decode.body` and `merge.body` are written once; a dialect is what their macros and primitives mean.

The kernel, per block: up to 8 query heads of one KV head over one split of the tokens.
Each warp takes 16 tokens at a time. Both products are tensor-core ones (16 x 8 x 16):
scores are queries times codes of keys, in fp32 and scaled once a group, since
q . k = sum over groups of scale * (q . codes) + bias * sum(q); outputs are weights
times codes of values, the weights being probability times scale. Codes are exact
halves; queries and weights are two halves each, rows 0..7 and 8..15 of the left operand,
so 22 bits of them count. Which dimension or token goes to which row of a fragment is
ours to choose, so each lane loads contiguous codes and never exchanges any.

Dialects are CUDA, Metal, and the tests' plain C++. Metal's 8 x 8 matrices have PTX's
fragments for the left operand and the sum, once lanes are counted in another order; the
right one is transposed by shuffles.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


@cache
def text(name: str) -> str:
    """One of the files beside this module."""
    return (_HERE / name).read_text()


@cache
def header(dialect: str) -> str:
    """What goes before a kernel: for `mx.fast.cuda_kernel` that of "cuda", for `mx.fast.metal_kernel` that of "metal"."""
    return f"{text(f'{dialect}.inc')}{text('common.inc')}}}  // namespace decode_attention\nusing namespace decode_attention;\n"


@cache
def body(dialect: str, name: str) -> str:
    """A kernel's body in a dialect."""
    return text("metal.body") + text(name) if dialect == "metal" else text(name)


@cache
def bounded(warps: int, resident: int) -> str:
    """CUDA's header with a bound on registers. mlx writes the kernel's signature itself, so the bound goes in by the keyword before it."""
    if not resident:
        return header("cuda")
    return f"{header('cuda')}#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({32 * warps}, {resident})\n"


@cache
def digest(dialect: str) -> str:
    """Of all the text. It is in the kernels' names: mlx keeps compiled kernels on disk by name alone."""
    parts = (header(dialect), body(dialect, "decode.body"), body(dialect, "merge.body"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]
