"""Caches of several families whose contents are a function of their tokens: any wrong byte can be told."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_lm_tiered import caches as kinds

WINDOW = 16

Tokens = tuple[int, ...]


def numbers(tokens: Tokens, salt: int, dim: int) -> mx.array:
    """(1, 2, tokens, dim) float32; those of a token depend on it and all before it."""
    hashes, crc = [], salt
    for token in tokens:
        crc = zlib.crc32(token.to_bytes(8, "big"), crc)
        hashes.append(crc)
    rows = (np.array(hashes, np.uint64)[:, None] * np.arange(1, 2 * dim + 1, dtype=np.uint64)) % 65_521
    return mx.array((rows.astype(np.float32) / 65_521).reshape(len(tokens), 2, dim).transpose(1, 0, 2)[None])


def _kv(cache: Any, tokens: Tokens, salt: int, piece: int) -> Any:
    dim = 32 if isinstance(cache, QuantizedKVCache) else 8
    values = numbers(tokens, salt, dim)
    for start in range(0, len(tokens), piece):
        cache.update_and_fetch(values[:, :, start : start + piece], values[:, :, start : start + piece] + 1)
    return cache


def _quantized(tokens: Tokens, salt: int) -> Any:
    cache = QuantizedKVCache(group_size=32, bits=8)
    kinds.observe([cache])
    return _kv(cache, tokens, salt, len(tokens))


def _state(tokens: Tokens, salt: int) -> ArraysCache:
    cache = ArraysCache(size=2)
    cache[0], cache[1] = numbers(tokens, salt, 8)[:, :, -1:], numbers(tokens, salt + 1, 8)[:, :, -1]
    return cache


# A ring's layout depends on the steps that filled it: always one token a step.
FAMILIES = {
    "plain": lambda t: [_kv(KVCache(), t, salt, len(t)) for salt in (1, 2)],
    "quantized": lambda t: [_quantized(t, 1), _kv(KVCache(), t, 2, len(t))],
    "rotating": lambda t: [_kv(RotatingKVCache(WINDOW), t, salt, 1) for salt in (1, 2)],
    "recurrent": lambda t: [_state(t, 1), _state(t, 2)],
    "mixed": lambda t: [_kv(KVCache(), t, 1, len(t)), _state(t, 2), _kv(RotatingKVCache(WINDOW), t, 3, 1)],
}
CUTTABLE = ("plain", "quantized")


@lru_cache(maxsize=2000)
def _made(family: str, tokens: Tokens) -> list[Any]:
    caches = FAMILIES[family](tokens)
    mx.eval([cache.state for cache in caches])
    return caches


def make(family: str, tokens: Tokens) -> list[Any]:
    """New caches that hold these tokens, the same numbers each time."""
    return kinds.lend(_made(family, tokens))


def content(caches: list[Any]) -> Any:
    """Everything that the caches hold, as bytes."""
    dumped = kinds.dump(caches)
    return dumped.descriptors, {name: np.array(t.array).tobytes() for name, t in dumped.tensors.items()}


def goes_on(family: str, caches: list[Any], held: int, tokens: Tokens) -> None:
    """Add what `tokens` has behind the first `held`, which `caches` hold, in place. For families that can be cut."""
    for cache, salt in zip(caches, (1, 2), strict=True):
        values = numbers(tokens, salt, 32 if isinstance(cache, QuantizedKVCache) else 8)[:, :, held:]
        cache.update_and_fetch(values, values + 1)
