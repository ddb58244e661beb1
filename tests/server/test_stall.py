"""``bench stall`` at a small size: what it compares did happen, and no answer differs."""

from __future__ import annotations

from mlx_lm_tiered.bench import stall


def test_bench_stall(tiny_llama):
    found = stall.run(tiny_llama, prefix_tokens=800, pairs=1, window=0.5)
    assert found["text_equal"] and found["pairs"] == 1
    assert found["cached_tokens"] == found["ram_cached_tokens"] == found["prefix_tokens"] - 1
    assert found["growth"] > 0 and found["tokenize_ms"] > 0 and found["longest_ms"] >= found["p99_with_ms"]
    assert found["restores_in_background"] >= 1 and found["intervals"] > 0
    assert found["p99_ratio"] == found["disk"][0]["p99_during"] / found["control"][0]["p99_during"] > 0
