"""How the work of a step is cut up: warps a block, splits of the tokens, and how many blocks a multiprocessor should hold.

The numbers are those of a sweep on one H200 (`mlx_lm.tiered bench kernels sweep`) with 32 query and 8 KV heads of
dimension 128. Four warps and four resident blocks were the best for 4 and 8 bits at 4,096 and 16,384 tokens. At 65,536
three were better by 6 and 7 %, which is within what the same kernel varied by; and another one would be compiled in
mid-generation.

On Metal nothing was measured. Of a long context 256 blocks of four simdgroups are 32 splits for 8 units, which is what
mlx's own attention in two passes takes for a KV head on the smaller chips.
"""

from __future__ import annotations

from typing import NamedTuple

# Tokens that a warp takes at a time.
TOKENS = 16
MULTIPROCESSORS, RESIDENT = 132, 4
# From here on the last split's waiting costs more than what more splits have to merge.
LONG = 32768
# Heads of a larger dimension, or more of them, need more registers than so many resident blocks leave a thread.
LARGEST_DIM, MOST_HEADS = 128, 4
METAL_BLOCKS = 256


class Tuning(NamedTuple):
    """`warps` a block (1, 2, 4 or 8); `splits` of the tokens, each a block per KV head and row; `resident` blocks that a multiprocessor should hold.

    `resident` bounds the registers of a thread; 0 leaves them to the compiler, as always on Metal.
    """

    warps: int
    splits: int
    resident: int = 0


def choose(tokens: int, units: int, bits: int, dim: int, each: int, language: str = "cuda") -> Tuning:
    """For a context of `tokens`, `units` (KV heads times rows times eights of query heads), and `each` query heads a KV head of dimension `dim`."""
    warps = 4
    # Blocks that each multiprocessor has to compute: 33 splits for 8 units, and of a long context 66, or 49 of wider codes.
    blocks = 2 if tokens < LONG else 4 if bits <= 4 else 3
    most = max(1, (METAL_BLOCKS if language == "metal" else MULTIPROCESSORS * blocks) // units)
    splits = max(1, min(most, -(-tokens // (TOKENS * warps))))
    return Tuning(warps, splits, RESIDENT if language == "cuda" and dim <= LARGEST_DIM and each <= MOST_HEADS else 0)
