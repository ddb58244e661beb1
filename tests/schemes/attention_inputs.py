"""What attention is tried with."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


def noise(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


# By name: the mask of `n` queries over `slots` keys, of two rows.
MASKS = {
    "none": lambda n, slots: None,
    "causal": lambda n, slots: "causal",
    "window": lambda n, slots: create_causal_mask(n, slots - n, window_size=50),
    "left padding": lambda n, slots: create_causal_mask(n, slots - n, left_padding=mx.array([3, 90])),
    "a row that sees nothing": lambda n, slots: create_causal_mask(n, slots - n, left_padding=mx.array([0, slots])),
    "summands": lambda n, slots: mx.where(create_causal_mask(n, slots - n), 0.0, -1e9),
}
