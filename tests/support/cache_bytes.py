"""Caches written as bytes and read again, as the tiers do it."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_tiered import caches as kinds


def through_bytes(caches: list[Any], *, room: int = 0) -> list[Any]:
    """Dump, write as bytes and JSON, read again, load; with `room` more slots where that is allowed."""
    descriptors, tensors = kinds.dump(caches)
    arrays = {name: _from_bytes(t, room) for name, t in tensors.items()}
    return kinds.load(json.loads(json.dumps(descriptors)), arrays)


def _from_bytes(tensor: kinds.Tensor, room: int) -> mx.array:
    array = kinds.made(tensor.array)
    bf16 = array.dtype == mx.bfloat16
    raw = np.array(array.view(mx.uint16) if bf16 else array)
    raw = np.frombuffer(raw.tobytes(), raw.dtype).reshape(array.shape)
    if tensor.grow_axis is not None and room:
        pad = [(0, 0)] * raw.ndim
        pad[tensor.grow_axis] = (0, room)
        raw = np.pad(raw, pad)
    back = mx.array(raw)
    return back.view(mx.bfloat16) if bf16 else back
