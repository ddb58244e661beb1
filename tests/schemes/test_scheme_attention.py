"""Attention over quantized KV: tiles against all at once, with masks, sinks and rows of different kinds."""

from __future__ import annotations

import mlx.core as mx
import pytest
from attention_inputs import MASKS, noise
from mlx_lm.models import base

from mlx_lm_tiered.schemes import attention, fused, softmax
from mlx_lm_tiered.schemes.caches import QuantizedKVCache

ROWS, HEADS, KV_HEADS, DIM = 2, 6, 2, 64


def held(slots: int, bits: int = 4, dim: int = DIM, value_dim: int = 0):
    cache = QuantizedKVCache(bits=bits, group_size=32)
    return cache.update_and_fetch(noise(ROWS, KV_HEADS, slots, dim, seed=1), noise(ROWS, KV_HEADS, slots, value_dim or dim, seed=2))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [1, 40])
def test_tiles_are_within_rounding_of_upstream(name, n):
    keys, values = held(130)
    queries, mask = noise(ROWS, HEADS, n, DIM, seed=3), MASKS[name](n, 130)
    expected = base.quantized_scaled_dot_product_attention(mx.array(queries), keys, values, 0.2, mask, 32, 4)
    for tile in (13, 64, 130, 1000):
        assert mx.abs(attention.tiled(queries, keys, values, 0.2, mask, tile=tile) - expected).max() < 1e-5


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("most", [1, 1 << 26])
def test_on_cuda_many_queries_go_to_the_fused_kernel_some_heads_at_a_time(name, most, monkeypatch):
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    monkeypatch.setattr(fused, "MOST", most)
    cache = QuantizedKVCache(bits=4, group_size=32)
    keys, values = cache.update_and_fetch(noise(ROWS, 6, 130, DIM, seed=1), noise(ROWS, 6, 130, 96, seed=2))
    asked = []
    once = fused.at_once
    monkeypatch.setattr(fused, "at_once", lambda *of: asked.append((*of, once(*of))) or once(*of))
    for n in (2, 40):
        queries, mask = noise(ROWS, 12, n, DIM, seed=3), MASKS[name](n, 130)
        per_head = mx.broadcast_to(mask, (ROWS, 12, n, 130)) if isinstance(mask, mx.array) else mask
        for given in (mask, per_head):
            found = attention.build(base.quantized_scaled_dot_product_attention)(queries, keys, values, 0.2, given, 32, 4)
            expected = attention.tiled(queries, keys, values, 0.2, mask)
            # Of padding mlx says something else.
            seen = slice(0, 1) if name == "a row that sees nothing" else slice(None, None) if name != "left padding" else slice(0, 2)
            first = 0 if name not in ("left padding",) else max(0, 90 - (130 - n))
            assert mx.abs(found[seen, :, first:] - expected[seen, :, first:]).max() < 1e-5
    assert {of[:2] for of in asked} == {(6, ROWS * 130 * (DIM + 96))} and {of[2] for of in asked} == {1 if most == 1 else 3}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_few_queries_give_upstreams_numbers_bit_for_bit(name, bits):
    for n, kv_heads in ((1, 2), (3, 2), (8, 2), (1, 6)):
        cache = QuantizedKVCache(bits=bits, group_size=32)
        keys, values = cache.update_and_fetch(*(noise(ROWS, kv_heads, 130, DIM, seed=seed) for seed in (1, 2)))
        queries, mask = noise(ROWS, HEADS, n, DIM, seed=3), MASKS[name](n, 130)
        expected = base.quantized_scaled_dot_product_attention(mx.array(queries), keys, values, 0.2, mask, 32, bits)
        attend = attention.build(base.quantized_scaled_dot_product_attention)
        assert mx.array_equal(attend(queries, keys, values, 0.2, mask, 32, bits), expected)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_every_width(bits):
    keys, values = held(70, bits, 128)
    queries = noise(ROWS, HEADS, 9, 128, seed=3)
    expected = base.quantized_scaled_dot_product_attention(mx.array(queries), keys, values, 0.1, "causal", 32, bits)
    assert mx.abs(attention.tiled(queries, keys, values, 0.1, "causal", tile=32) - expected).max() < 1e-5


def test_sinks_and_other_value_dimensions_as_mlx_has_them():
    keys, values = held(70, 8, value_dim=32)
    queries, sinks = noise(ROWS, HEADS, 9, DIM, seed=3), noise(HEADS, seed=4) * 3
    plain = [mx.dequantize(*side, group_size=32, bits=8) for side in (keys, values)]
    expected = mx.fast.scaled_dot_product_attention(queries, *plain, scale=0.2, mask="causal", sinks=sinks)
    attend = attention.build(base.quantized_scaled_dot_product_attention)
    assert mx.abs(attend(queries, keys, values, 0.2, "causal", 32, 8, sinks) - expected).max() < 1e-5
    for mask in ("causal", noise(ROWS, HEADS, 9, 70, seed=9) > 0):
        expected = mx.fast.scaled_dot_product_attention(queries, *plain, scale=0.2, mask=mask)
        assert mx.abs(attend(queries, keys, values, 0.2, mask, 32, 8) - expected).max() < 1e-5


def test_sinks_go_with_their_heads(monkeypatch):
    monkeypatch.setattr(attention, "on_cuda", lambda: True)
    keys, values = held(70, 8)
    queries, sinks = noise(ROWS, HEADS, 9, DIM, seed=3), noise(HEADS, seed=4) * 3
    attend = attention.build(base.quantized_scaled_dot_product_attention)
    assert mx.abs(attend(queries, keys, values, 0.2, "causal", 32, 8, sinks) - attention.tiled(queries, keys, values, 0.2, "causal", sinks)).max() < 1e-5


def test_where_mlx_cannot_multiply_slices_tiles_serve_decoding(monkeypatch):
    """Fault 15: mlx on CUDA has no quantized matrix product over a cache that is not exactly full."""
    keys, values = held(70)
    queries = noise(ROWS, KV_HEADS, 1, DIM, seed=3)
    expected = base.quantized_scaled_dot_product_attention(mx.array(queries), keys, values, 0.1, None, 32, 4)

    def refuse(*args, **kwargs):
        raise RuntimeError("No implementation for problem shape")

    attend = attention.build(refuse)
    with pytest.raises(RuntimeError):
        attend(queries, keys, values, 0.1, None, 32, 4)
    monkeypatch.setattr(attention, "_strided_unsupported", lambda: True)
    assert mx.abs(attend(queries, keys, values, 0.1, None, 32, 4) - expected).max() < 1e-5


def test_the_scores_in_memory_do_not_grow_with_the_context(monkeypatch):
    monkeypatch.setattr(softmax, "TILE", 1 << 19)
    monkeypatch.setattr(softmax, "LARGE", 1 << 14)
    length, slots, heads = 256, 16384, 4
    cache = QuantizedKVCache(bits=4, group_size=64)
    for start in range(0, slots, 4096):
        side = noise(1, 2, 4096, DIM, seed=start)
        mx.eval(cache.update_and_fetch(side, side))
    keys, values = cache.keys_and_values()
    queries = noise(1, heads, length, DIM, seed=3)
    mx.eval(queries)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    attend = attention.build(base.quantized_scaled_dot_product_attention)
    mx.eval(attend(queries, keys, values, 0.1, "causal", 64, 4))
    assert mx.get_peak_memory() - before < heads * length * slots * 4 / 4
