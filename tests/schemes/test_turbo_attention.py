"""Attention over TurboQuant KV without a kernel, against attention over what it decodes to, and over what was encoded."""

from __future__ import annotations

import mlx.core as mx
import pytest
from attention_inputs import MASKS, noise
from mlx_lm.models import base

from mlx_lm_tiered.schemes import attention, softmax, turbo_attention
from mlx_lm_tiered.schemes.spec import Turbo
from mlx_lm_tiered.schemes.turbo import Pair, TurboQuantKVCache
from mlx_lm_tiered.turboquant import codec
from mlx_lm_tiered.turboquant.codec import Encoded

attend = attention.build(base.quantized_scaled_dot_product_attention)


def held(slots: int, form: Turbo = Turbo(8, 3), dim: int = 128, rows: int = 1, kv_heads: int = 2, value_dim: int = 0, dtype: mx.Dtype = mx.float32):
    """Keys and values as a cache hands them out: slices of its larger buffers."""
    cache = TurboQuantKVCache(key_bits=form.key_bits, value_bits=form.value_bits)
    found = None
    for at in range(0, slots, 4096):
        n = min(4096, slots - at)
        keys = noise(rows, kv_heads, n, dim, seed=at + 1, dtype=dtype)
        found = cache.update_and_fetch(keys, noise(rows, kv_heads, n, value_dim or dim, seed=at + 2, dtype=dtype))
    return found


def decoded(keys: Pair, values: Pair) -> tuple[mx.array, mx.array]:
    return codec.decode_keys(Encoded(*keys), keys.bits), codec.decode_values(Encoded(*values), values.bits)


def error(found: mx.array, expected: mx.array) -> float:
    return (mx.linalg.norm((found - expected).flatten()) / mx.linalg.norm(expected.flatten())).item()


def exact(queries: mx.array, keys: Pair, values: Pair, scale: float, mask=None, sinks=None) -> mx.array:
    mask = mask.astype(mx.float32) if isinstance(mask, mx.array) and mask.dtype == mx.bfloat16 else mask
    return mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *decoded(keys, values), scale=scale, mask=mask, sinks=sinks)


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 1e-3), (mx.bfloat16, 1e-2), (mx.float16, 2e-3)])
@pytest.mark.parametrize("slots", [1, 31, 32, 33, 255, 257, 8193])
def test_it_is_that_over_decoded_kv(slots, dtype, bound):
    """Gate 2, with grouped queries; a decode step, the checking of a draft, and a chunk of a prefill."""
    keys, values = held(slots, dtype=dtype)
    for n in (1, 5, 40):
        if n <= slots:
            queries = noise(1, 8, n, 128, seed=7, dtype=dtype)
            found = attend(queries, keys, values, 0.09, "causal", 32, 8)
            assert found.dtype == dtype and found.shape == queries.shape
            assert error(found.astype(mx.float32), exact(queries, keys, values, 0.09, "causal")) < bound


@pytest.mark.parametrize(("dim", "form"), [(64, Turbo(8, 2)), (128, Turbo(2, 8)), (256, Turbo(8, 3)), (256, Turbo(5, 5)), (512, Turbo(4, 4))])
@pytest.mark.parametrize("n", [1, 20])
def test_every_width_and_head_dimension(dim, form, n):
    """k8v3 at 256 is corrupt elsewhere."""
    keys, values = held(70, form, dim)
    queries = noise(1, 6, n, dim, seed=3)
    for tile in (13, 64, 1000):
        found = turbo_attention.tiled(queries, keys, values, 0.08, "causal", packed=n == 1, tile=tile)
        assert error(found, exact(queries, keys, values, 0.08, "causal")) < 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_on_cuda_many_queries_go_to_the_fused_kernel(dtype, monkeypatch):
    keys, values = held(130, dtype=dtype, rows=2, value_dim=64)
    queries = noise(2, 8, 40, 128, seed=7, dtype=dtype)
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    for mask in ("causal", MASKS["window"](40, 130)):
        found = attend(queries, keys, values, 0.09, mask, 32, 8)
        assert found.dtype == dtype and found.shape == (2, 8, 40, 64)
        assert error(found.astype(mx.float32), exact(queries, keys, values, 0.09, mask)) < (1e-3 if dtype == mx.float32 else 1e-2)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [1, 40])
def test_masks(name, n):
    keys, values = held(130, rows=2)
    queries, mask = noise(2, 6, n, 128, seed=3), MASKS[name](n, 130)
    found, expected = attend(queries, keys, values, 0.09, mask, 32, 8), exact(queries, keys, values, 0.09, mask)
    seen = slice(0, 1) if name == "a row that sees nothing" else slice(0, 2)
    assert error(found[seen], expected[seen]) < 1e-4
    assert mx.isfinite(found).all()


def test_sinks_and_other_value_dimensions():
    keys, values = held(70, value_dim=64)
    queries, sinks = noise(1, 6, 9, 128, seed=3), noise(6, seed=4) * 3
    assert error(attend(queries, keys, values, 0.09, "causal", 32, 8, sinks), exact(queries, keys, values, 0.09, "causal", sinks)) < 1e-4


def test_where_mlx_cannot_multiply_slices_keys_are_decoded(monkeypatch):
    """Fault 15: mlx on CUDA has no quantized matrix product over a cache that is not exactly full."""
    keys, values = held(70)
    queries = noise(1, 6, 1, 128, seed=3)
    monkeypatch.setattr(attention, "_strided_unsupported", lambda: True)
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **k: pytest.fail("it was asked"))
    assert error(attend(queries, keys, values, 0.09, None, 32, 8), exact(queries, keys, values, 0.09)) < 1e-4


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("form", "cosine", "norm"), [(Turbo(8, 3), 0.975, 0.2), (Turbo(8, 4), 0.99, 0.11), (Turbo(8, 8), 0.9999, 0.012)])
def test_how_far_it_is_from_full_precision(form, cosine, norm, dim):
    """Gate 3: 4096 keys, 64 queries, independent values, on which no averaging helps."""
    keys, values = held(4096, form, dim, kv_heads=1)
    queries = noise(1, 1, 64, dim, seed=9)
    plain = (noise(1, 1, 4096, dim, seed=1), noise(1, 1, 4096, dim, seed=2))
    expected = mx.fast.scaled_dot_product_attention(queries, *plain, scale=dim**-0.5)
    found = attend(queries, keys, values, dim**-0.5, None, 32, 8)
    assert (found * expected).sum() / (mx.linalg.norm(found.flatten()) * mx.linalg.norm(expected.flatten())) >= cosine
    assert error(found, expected) < norm


@pytest.mark.parametrize("n", [1, 256])
def test_what_is_in_memory_does_not_grow_with_the_context(monkeypatch, n):
    monkeypatch.setattr(softmax, "TILE", 1 << 19)
    monkeypatch.setattr(softmax, "LARGE", 1 << 10)
    monkeypatch.setattr(softmax, "LARGEST_TILE", 512)
    peaks = []
    for slots in (4096, 16384):
        keys, values = held(slots)
        queries = noise(1, 4, n, 128, seed=3)
        mx.eval(queries, *keys, *values)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attend(queries, keys, values, 0.1, "causal", 32, 8))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.3 * peaks[0] + (1 << 16) and peaks[1] < 2 * 16384 * 128 * 4
