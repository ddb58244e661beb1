"""Attention of many queries by mlx's own kernel, which holds no scores, over some heads' keys and values at a time.

They are dequantized for it and gone before the next heads' are. That is where mlx has
such a kernel and its operations are many times what they compute: on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

# Elements of keys and values that are dequantized at once, and from how many on they are finished before the next are.
MOST, LARGE = 1 << 26, 1 << 19

# Keys and values (rows, heads, slots, dim) of KV heads from the first up to the one behind the last.
Heads = Callable[[int, int], tuple[mx.array, mx.array]]


def at_once(kv_heads: int, elements: int) -> int:
    """KV heads whose keys and values, of so many elements each head, are dequantized at once: never all of several."""
    return max(1, min(MOST // max(1, elements), kv_heads // 2))


def by_heads(queries: mx.array, kv_heads: int, elements: int, sides_of: Heads, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Attention of `queries` (rows, heads, length, dim) as (rows, heads, length, value dim).

    `elements` are those of one KV head's keys and values. `mask` is None, ``"causal"``,
    or booleans or summands that broadcast to (rows, heads, length, slots); `sinks`
    (heads,) are logits of a key with no value.
    """
    each, step = queries.shape[1] // kv_heads, at_once(kv_heads, elements)
    outputs = []
    for first in range(0, kv_heads, step):
        last = min(first + step, kv_heads)
        keys, values = sides_of(first, last)
        heads = slice(first * each, last * each)
        of_heads = mask[:, heads] if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] > 1 else mask
        own = None if sinks is None else sinks[heads].astype(queries.dtype)
        outputs.append(mx.fast.scaled_dot_product_attention(queries[:, heads], keys, values, scale=scale, mask=of_heads, sinks=own))
        if keys.size > LARGE:
            # mlx runs a hundred operations ahead, and allocates for them.
            mx.eval(outputs[-1])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
