"""How the work of a step is cut up: warps a block, splits of the tokens, and how many blocks a multiprocessor should hold.

The numbers are those of sweeps on one H200 (`mlx_lm.tiered bench kernels sweep`) with 32 query and 8 KV heads of
dimension 128, whose figures vary by a tenth from run to run. Two blocks of eight warps, all that a multiprocessor holds
at once: a block's warps are merged in its own memory, so there are fewer splits for the last block to merge than with
twice as many blocks of four. Short contexts have fewer splits, as few as leave each warp something to do.

On Metal nothing was measured. Of a long context 256 blocks of four simdgroups are 32 splits for 8 units, which is what
mlx's own attention in two passes takes for a KV head on the smaller chips.
"""

from __future__ import annotations

from typing import NamedTuple

# Tokens that a warp takes at a time.
TOKENS = 16
MULTIPROCESSORS = 132
WARPS, RESIDENT = 8, 2
# Up to here half as many splits: there is less to merge.
SHORT = 8192
# Heads of a larger dimension, or more of them, need more registers than so many resident warps leave a thread: of these blocks are half as large, and so many.
LARGEST_DIM, MOST_HEADS = 128, 4
UNBOUNDED = 4
METAL_BLOCKS = 256


class Tuning(NamedTuple):
    """`warps` a block (1, 2, 4 or 8); `splits` of the tokens, each a block per KV head and row; `resident` blocks that a multiprocessor should hold.

    `resident` bounds the registers of a thread; 0 leaves them to the compiler, as always on Metal.
    """

    warps: int
    splits: int
    resident: int = 0


def choose(tokens: int, units: int, dim: int, each: int, language: str = "cuda") -> Tuning:
    """For a context of `tokens`, `units` (KV heads times rows times eights of query heads), and `each` query heads a KV head of dimension `dim`."""
    bounded = language == "cuda" and dim <= LARGEST_DIM and each <= MOST_HEADS
    warps, blocks = (WARPS, RESIDENT) if bounded else (WARPS // 2, UNBOUNDED)
    if tokens <= SHORT:
        blocks //= 2
    most = max(1, (METAL_BLOCKS if language == "metal" else MULTIPROCESSORS * blocks) // units)
    splits = max(1, min(most, -(-tokens // (TOKENS * warps))))
    return Tuning(warps, splits, RESIDENT if bounded else 0)
