"""Caches of every class in every state worth telling apart, and ways to use and compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.schemes.caches import (
    BatchQuantizedKVCache,
    BatchRotatingQuantizedKVCache,
    RotatingQuantizedKVCache,
)
from mlx_lm_tiered.schemes.caches import QuantizedKVCache as OurQuantizedKVCache
from mlx_lm_tiered.schemes.convert import convert
from mlx_lm_tiered.schemes.lockstep import Lockstep
from mlx_lm_tiered.schemes.spec import Affine, Turbo
from mlx_lm_tiered.schemes.turbo import BatchTurboQuantKVCache, TurboQuantKVCache

HEADS, DIM = 2, 64


def noise(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def tokens(start: int, stop: int, *, rows: int = 1, heads: int = HEADS, dim: int = DIM, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys or values of tokens, each a function of its position alone."""
    each = [noise(rows, heads, 1, dim, seed=1000 * dim + i, dtype=dtype) for i in range(start, stop)]
    return mx.concatenate(each, axis=2) if each else mx.zeros((rows, heads, 0, dim), dtype)


def bits(value: Any) -> Any:
    """A value in a form in which equality means the same bits."""
    if isinstance(value, mx.array):
        raw = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value
        return str(value.dtype), value.shape, np.array(raw).tobytes()
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    if hasattr(value, "__dict__"):
        return type(value).__name__, {name: bits(v) for name, v in vars(value).items()}
    return value


def advance(cache: Any, n: int, seed: int) -> list[Any]:
    """Use a cache as a model does for `n` tokens; everything the model would see."""
    if isinstance(cache, CacheList):
        return [advance(c, n, seed + i) for i, c in enumerate(cache.caches)]
    if isinstance(cache, ArraysCache):
        seen = [bits(cache.make_mask(n)), bits(cache.cache)]
        for i, slot in enumerate(cache.cache):
            shape, dtype = ((cache.batch_size, 3), mx.float32) if slot is None else (slot.shape, slot.dtype)
            fresh = noise(*shape, seed=seed + i, dtype=dtype)
            cache[i] = fresh if slot is None else (slot * 0.5 + fresh).astype(dtype)
        cache.advance(n)
        return seen
    if isinstance(cache, LayerCache):
        held = [a for a in (cache.window, cache.compress_kv, cache.pending_kv) if a is not None]
        rows, dim = (held[0].shape[0], held[0].shape[2]) if held else (1, 8)
        dtype = held[0].dtype if held else mx.float32
        seen = [bits(cache.update_window(noise(rows, n, dim, seed=seed, dtype=dtype))), cache.offset]
        for name in ("compress_kv", "index_k", "pending_kv", "pending_gate"):
            old = getattr(cache, name)
            new = noise(rows, n, dim if old is None else old.shape[2], seed=seed + 1)
            new = new if old is None else new.astype(old.dtype)
            setattr(cache, name, new if old is None else mx.concatenate([old, new], axis=1))
            seen.append(bits(getattr(cache, name)))
        return seen
    keys, values = _next(cache, n, seed)
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
        mask = cache.start_position
    else:
        mask = [bits(cache.make_mask(n, return_array=True, window_size=window)) for window in (None, 4)]
    return [mask, bits(_visible(cache, cache.update_and_fetch(keys, values))), bits(cache.offset)]


def _visible(cache: Any, fetched: Any) -> Any:
    """Without what lies in the left padding: no mask shows it, and upstream rolls slack in there."""
    if isinstance(cache, (BatchQuantizedKVCache, BatchTurboQuantKVCache)):
        shown = (mx.arange(fetched[0][0].shape[2]) >= cache.left_padding[:, None])[:, None, :, None]
        return [[mx.where(shown, a, mx.array(0, a.dtype)) for a in side] for side in fetched]
    if not isinstance(cache, BatchKVCache):
        return fetched
    shown = mx.arange(fetched[0].shape[2]) >= cache.left_padding[:, None]
    return [mx.where(shown[:, None, :, None], a, 0) for a in fetched]


def _next(cache: Any, n: int, seed: int) -> tuple[mx.array, mx.array]:
    rows = cache.left_padding.shape[0] if hasattr(cache, "left_padding") else 1
    if cache.keys is None:
        shape, key_dim, value_dim, dtype = (rows, HEADS, n), DIM, DIM, mx.float32
    elif isinstance(cache, Lockstep):
        (heads, key_dim, dtype), (_, value_dim, _) = cache.shapes()
        shape = (cache.keys[0].shape[0], heads, n)
    elif isinstance(cache, QuantizedKVCache):
        shape = (*cache.keys[1].shape[:2], n)
        key_dim, value_dim = (t[1].shape[3] * cache.group_size for t in (cache.keys, cache.values))
        dtype = cache.keys[1].dtype
    else:
        shape = (*cache.keys.shape[:2], n)
        key_dim, value_dim, dtype = cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype
    return noise(*shape, key_dim, seed=seed, dtype=dtype), noise(*shape, value_dim, seed=seed + 77, dtype=dtype)


def fill(cache: Any, *chunks: int, dtype: mx.Dtype = mx.float32, value_dim: int = DIM, rows: int = 1) -> Any:
    """Feed chunks of tokens, negative ones trimmed again."""
    at = 0
    for n in chunks:
        if n < 0:
            cache.trim(-n)
        else:
            cache.update_and_fetch(
                tokens(at, at + n, dtype=dtype, rows=rows), tokens(at, at + n, dim=value_dim, dtype=dtype, rows=rows)
            )
        at += n
    return cache


def quantized(bit_count: int, *chunks: int, group_size: int = 32, dtype: mx.Dtype = mx.float32, first: int = 0) -> QuantizedKVCache:
    """Converted after `first` tokens, or quantized from the first on."""
    if not first:
        return fill(QuantizedKVCache(group_size, bit_count), *chunks, dtype=dtype)
    cache = fill(KVCache(), first, dtype=dtype).to_quantized(group_size=group_size, bits=bit_count)
    kinds.observe([cache])
    return fill(cache, *chunks, dtype=dtype)


def affine(make: Any, *chunks: int, bit_count: int = 4, rows: int = 1, dtype: mx.Dtype = mx.float32, at: int = 0) -> Any:
    """A cache of a scheme; with `at`, a plain one converted when it holds that many tokens."""
    if not at:
        return fill(make(bits=bit_count, group_size=32), *chunks, rows=rows, dtype=dtype)
    cache = fill(make(), at, dtype=dtype)
    convert([cache], Affine(bit_count, 32), at)
    return fill(cache, *chunks, dtype=dtype)


def turbo(make: Any, *chunks: int, form: Turbo = Turbo(8, 3), rows: int = 1, dtype: mx.Dtype = mx.float32, at: int = 0, value_dim: int = DIM) -> Any:
    """The same of TurboQuant."""
    if not at:
        return fill(make(key_bits=form.key_bits, value_bits=form.value_bits), *chunks, rows=rows, dtype=dtype, value_dim=value_dim)
    cache = fill(make(), at, dtype=dtype)
    convert([cache], form, at)
    return fill(cache, *chunks, dtype=dtype)


def batch_turbo(padding: list[int]) -> Any:
    return lambda **bits: BatchTurboQuantKVCache(padding, **bits)


def ring(size: int, keep: int = 0) -> Any:
    return lambda **scheme: RotatingQuantizedKVCache(size, keep, **scheme)


def batch_ring(size: int, padding: list[int]) -> Any:
    return lambda **scheme: BatchRotatingQuantizedKVCache(size, padding, **scheme)


def batch_of(padding: list[int]) -> Any:
    return lambda **scheme: BatchQuantizedKVCache(padding, **scheme)


def arrays(*slots: tuple[tuple[int, ...], mx.Dtype] | None, left_padding: list[int] | None = None, lengths: list[int] | None = None) -> ArraysCache:
    cache = ArraysCache(len(slots), left_padding)
    for i, slot in enumerate(slots):
        cache[i] = None if slot is None else noise(*slot[0], seed=i, dtype=slot[1])
    if lengths is not None:
        cache.prepare(lengths=lengths)
    return cache


def layer(n: int, *more: int) -> LayerCache:
    cache = LayerCache(4)
    for i, count in enumerate((n, *more)):
        if count:
            advance(cache, count, seed=i)
    return cache


def right_padded(cache: Any) -> Any:
    """In the middle of a right-padded prefill."""
    cache.prepare(lengths=[3, 5], right_padding=[2, 0])
    return fill(cache, 5, rows=2)


def filtered(cache: Any, rows: list[int]) -> Any:
    cache.filter(mx.array(rows))
    return cache


def extended(cache: Any, other: Any) -> Any:
    cache.extend(other)
    return cache


SSM = ((1, 3, 8), mx.float32)

STATES: dict[str, Callable[[], Any]] = {
    "kv-empty": KVCache,
    "kv-one": lambda: fill(KVCache(), 1),
    "kv-slack": lambda: fill(KVCache(), 10, 1),
    "kv-exact": lambda: fill(KVCache(), 256),
    "kv-grown": lambda: fill(KVCache(), 250, 9),
    "kv-trimmed": lambda: fill(KVCache(), 20, -7),
    "kv-trimmed-to-nothing": lambda: fill(KVCache(), 20, -20),
    "kv-bf16": lambda: fill(KVCache(), 10, dtype=mx.bfloat16),
    "kv-fp16": lambda: fill(KVCache(), 10, dtype=mx.float16),
    "kv-other-value-dim": lambda: fill(KVCache(), 10, value_dim=16),
    "kv-no-values": lambda: fill(KVCache(), 10, value_dim=0),
    "kv-two-rows": lambda: fill(KVCache(), 10, rows=2),
    "concat-empty": ConcatenateKVCache,
    "concat": lambda: fill(ConcatenateKVCache(), 10, 1, dtype=mx.bfloat16),
    "rotating-empty": lambda: RotatingKVCache(8, keep=2),
    "rotating-chunk": lambda: fill(RotatingKVCache(8), 5),
    "rotating-slack": lambda: fill(RotatingKVCache(8, keep=2), 1, 1, 1),
    "rotating-roomy": lambda: fill(RotatingKVCache(1000), 5, 1),
    "rotating-trimmed": lambda: fill(RotatingKVCache(8), 5, 1, -2),
    "rotating-full": lambda: fill(RotatingKVCache(8), 5, 1, 1, 1),
    **{
        f"rotating-wrapped-{n}-keep-{keep}": lambda n=n, keep=keep: fill(RotatingKVCache(8, keep=keep), 7, *[1] * n)
        for n in (2, 5, 8, 9, 14)
        for keep in (0, 3)
    },
    "rotating-long-chunk": lambda: fill(RotatingKVCache(8), 20),
    "rotating-long-chunk-keep": lambda: fill(RotatingKVCache(8, keep=2), 20, dtype=mx.float16),
    "rotating-long-chunk-step": lambda: fill(RotatingKVCache(8, keep=2), 20, 1),
    "rotating-two-chunks": lambda: fill(RotatingKVCache(8, keep=2), 6, 5, dtype=mx.bfloat16),
    "rotating-wrapped-chunk": lambda: fill(RotatingKVCache(8), 6, 1, 1, 1, 1, 5),
    **{f"quantized-{b}-bits": lambda b=b: quantized(b, 10, 3) for b in (2, 4, 8)},
    **{f"quantized-{b}-bits-bf16": lambda b=b: quantized(b, 3, first=10, group_size=64, dtype=mx.bfloat16) for b in (4, 8)},
    "quantized-fp16": lambda: quantized(8, 3, first=300, dtype=mx.float16),
    "quantized-empty": lambda: QuantizedKVCache(32, 4),
    "quantized-trimmed": lambda: quantized(8, 10, -3, first=5),
    "arrays-empty": lambda: ArraysCache(2),
    "arrays-one": lambda: arrays(SSM),
    "arrays-holes": lambda: arrays(SSM, None, ((1, 2, 4, 4), mx.bfloat16)),
    "arrays-first-missing": lambda: arrays(None, SSM),
    "arrays-many": lambda: arrays(*[SSM] * 3, ((1, 5), mx.int32)),
    "arrays-batch": lambda: arrays(((2, 3, 8), mx.float16), left_padding=[1, 0], lengths=[4, 5]),
    "arrays-no-columns": lambda: arrays(((1, 0, 8), mx.float32)),
    "chunked-empty": lambda: ChunkedKVCache(8),
    "chunked": lambda: fill(ChunkedKVCache(8), 5, 1),
    "chunked-over": lambda: fill(ChunkedKVCache(8), 20),
    "chunked-front-trimmed": lambda: _front_trimmed(fill(ChunkedKVCache(8), 20)),
    "chunked-front-trimmed-step": lambda: fill(_front_trimmed(fill(ChunkedKVCache(8), 20)), 3, dtype=mx.float32),
    "list": lambda: CacheList(fill(KVCache(), 10), fill(KVCache(), 10, value_dim=0)),
    "list-hybrid": lambda: CacheList(arrays(SSM, None), fill(KVCache(), 10)),
    "list-deep": lambda: CacheList(CacheList(CacheList(fill(RotatingKVCache(8), 9), quantized(4, 9)), arrays(SSM)), KVCache()),
    "batch-empty": lambda: BatchKVCache([2, 0]),
    "batch": lambda: fill(BatchKVCache([2, 0]), 5, 1, rows=2),
    "batch-trimmed": lambda: fill(BatchKVCache([2, 0]), 5, -1, rows=2),
    "batch-right-padded": lambda: right_padded(BatchKVCache([0, 0])),
    "batch-filtered": lambda: filtered(fill(BatchKVCache([2, 1]), 5, rows=2), [0]),
    "batch-extended": lambda: extended(fill(BatchKVCache([2, 0]), 5, rows=2), fill(BatchKVCache([0]), 9)),
    "batch-rotating-empty": lambda: BatchRotatingKVCache(8, [2, 0]),
    "batch-rotating": lambda: fill(BatchRotatingKVCache(8, [2, 0]), 5, 1, rows=2),
    "batch-rotating-slack": lambda: fill(BatchRotatingKVCache(8, [1, 0]), 1, 1, rows=2, dtype=mx.bfloat16),
    "batch-rotating-rotated": lambda: fill(BatchRotatingKVCache(8, [2, 0]), 5, *[1] * 6, rows=2),
    "batch-rotating-long-chunk": lambda: fill(BatchRotatingKVCache(8, [2, 0]), 20, 1, 4, rows=2),
    "batch-rotating-right-padded": lambda: right_padded(BatchRotatingKVCache(8, [0, 0])),
    "batch-rotating-extended": lambda: extended(
        fill(BatchRotatingKVCache(8, [2, 0]), 12, rows=2), fill(BatchRotatingKVCache(8, [0]), 1, 1)
    ),
    "affine-empty": lambda: affine(OurQuantizedKVCache),
    **{f"affine-{b}-bits": lambda b=b: affine(OurQuantizedKVCache, 10, 3, bit_count=b) for b in (2, 3, 5, 6, 8)},
    "affine-grown-bf16": lambda: affine(OurQuantizedKVCache, 250, 9, dtype=mx.bfloat16),
    "affine-trimmed": lambda: affine(OurQuantizedKVCache, 20, -7),
    "affine-converted": lambda: affine(KVCache, 3, 1, at=10),
    "affine-rotating-empty": lambda: affine(ring(8, 2)),
    "affine-rotating-slack": lambda: affine(ring(8, 2), 1, 1, 1, dtype=mx.float16),
    "affine-rotating-wrapped": lambda: affine(ring(8, 3), 7, *[1] * 5),
    "affine-rotating-long-chunk": lambda: affine(ring(8), 20, 1, 5),
    "affine-rotating-converted": lambda: affine(lambda: RotatingKVCache(8, keep=2), 1, 1, 1, at=7),
    "batch-affine-empty": lambda: affine(batch_of([2, 0]), rows=2),
    "batch-affine": lambda: affine(batch_of([2, 0]), 5, 1, rows=2),
    "batch-affine-right-padded": lambda: right_padded(affine(batch_of([0, 0]))),
    "batch-affine-filtered": lambda: filtered(affine(batch_of([2, 1]), 5, rows=2), [0]),
    "batch-affine-extended": lambda: extended(affine(batch_of([2, 0]), 5, rows=2), affine(batch_of([0]), 9)),
    "batch-affine-rotating-empty": lambda: affine(batch_ring(8, [2, 0])),
    "batch-affine-rotating": lambda: affine(batch_ring(8, [2, 0]), 5, 1, rows=2),
    "batch-affine-rotating-rotated": lambda: affine(batch_ring(8, [2, 0]), 5, *[1] * 6, rows=2),
    "batch-affine-rotating-right-padded": lambda: right_padded(affine(batch_ring(8, [0, 0]))),
    "turbo-empty": lambda: turbo(TurboQuantKVCache),
    **{f"turbo-k{k}v{v}": lambda k=k, v=v: turbo(TurboQuantKVCache, 10, 3, form=Turbo(k, v)) for k, v in ((2, 2), (4, 3), (5, 4), (8, 5), (8, 8))},
    "turbo-grown-bf16": lambda: turbo(TurboQuantKVCache, 250, 9, dtype=mx.bfloat16),
    "turbo-other-value-dim": lambda: turbo(TurboQuantKVCache, 10, value_dim=128, dtype=mx.float16),
    "turbo-trimmed": lambda: turbo(TurboQuantKVCache, 20, -7),
    "turbo-trimmed-to-nothing": lambda: turbo(TurboQuantKVCache, 20, -20),
    "turbo-converted": lambda: turbo(KVCache, 3, 1, at=10, dtype=mx.bfloat16),
    "batch-turbo-empty": lambda: turbo(batch_turbo([2, 0]), rows=2),
    "batch-turbo": lambda: turbo(batch_turbo([2, 0]), 5, 1, rows=2),
    "batch-turbo-right-padded": lambda: right_padded(turbo(batch_turbo([0, 0]))),
    "batch-turbo-filtered": lambda: filtered(turbo(batch_turbo([2, 1]), 5, rows=2), [0]),
    "batch-turbo-extended": lambda: extended(turbo(batch_turbo([2, 0]), 5, rows=2), turbo(batch_turbo([0]), 9)),
    "layer-empty": lambda: LayerCache(4),
    "layer": lambda: layer(3),
    "layer-wrapped": lambda: layer(9, 1, 4),
}  # fmt: skip


def _front_trimmed(cache: ChunkedKVCache) -> ChunkedKVCache:
    cache.maybe_trim_front()
    return cache
