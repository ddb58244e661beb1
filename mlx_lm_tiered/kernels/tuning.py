"""How the work of a step is cut up: warps a block, splits of the tokens, and how many blocks a multiprocessor should hold.

The numbers are those of sweeps on one H200 (`mlx_lm.tiered bench kernels sweep`) with 32 query and 8 KV heads of
dimension 128, whose figures vary by a tenth from run to run. Blocks of four warps, as many as a multiprocessor holds at
once and no more: four, but three for values of more than 5 bits, whose loop needs more registers. Short contexts have
fewer splits, as few as leave each warp something to do.

On Metal nothing was measured. Of a long context 256 blocks of four simdgroups are 32 splits for 8 units, which is what
mlx's own attention in two passes takes for a KV head on the smaller chips.
"""

from __future__ import annotations

from typing import NamedTuple

# Tokens that a warp takes at a time.
TOKENS = 16
MULTIPROCESSORS = 132
# Resident blocks, and for values of more bits than these.
RESIDENT, WIDE_RESIDENT, WIDE = 4, 3, 5
# Up to here half as many splits: there is less to merge.
SHORT = 8192
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
    """For a context of `tokens`, `units` (KV heads times rows times eights of query heads), values of `bits`, and `each` query heads a KV head of dimension `dim`."""
    warps, resident = 4, RESIDENT if bits <= WIDE else WIDE_RESIDENT
    blocks = resident if tokens > SHORT else 2
    most = max(1, (METAL_BLOCKS if language == "metal" else MULTIPROCESSORS * blocks) // units)
    splits = max(1, min(most, -(-tokens // (TOKENS * warps))))
    return Tuning(warps, splits, resident if language == "cuda" and dim <= LARGEST_DIM and each <= MOST_HEADS else 0)
