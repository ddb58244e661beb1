"""``mlx_lm.tiered bench schemes`` and ``bench peak`` with small numbers."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_tiered.bench import peak, report, schemes
from mlx_lm_tiered.schemes import softmax
from mlx_lm_tiered.schemes.convert import convert
from mlx_lm_tiered.schemes.spec import Affine
from support.models import TINY


def test_its_rows_tell_schemes_apart():
    result = schemes.run(TINY["llama"], ["bf16", "affine:8:32", "affine:3:32@20"], tokens=60, decode_tokens=2, repeats=2, text_tokens=160)
    full, eight, three = result["rows"]
    assert [row["scheme"] for row in result["rows"]] == ["bf16", "affine:8:32", "affine:3:32@20"], "as on the command line"
    assert full["kl"] == 0 and full["top1"] == 1 and full["decode_ratio_to_bf16"] == 1
    assert 0 < eight["kl"] < 0.01 < three["kl"] and three["top1"] < 1
    assert full["bytes_per_token"] > eight["bytes_per_token"] > three["bytes_per_token"]
    assert eight["decode_ratio_to_upstream"] > 0 and three["decode_ratio_to_upstream"] is None
    assert all(row["prefill_peak_bytes"] > 0 and row["decode_peak_bytes"] > 0 for row in result["rows"])
    assert eight["logit_difference_to_upstream"] == 0 and eight["tiled_logit_difference"] < 1
    assert "logit_difference_to_upstream" not in three, "whose width and start mlx-lm does not have"


def test_a_table_has_what_only_some_rows_have():
    """Only some schemes have a counterpart in mlx-lm."""
    lines = report.table([{"scheme": "bf16", "kl": 0.0}, {"scheme": "affine:8", "kl": 0.00041, "difference": 0.0}]).splitlines()
    assert [line.split() for line in lines] == [["scheme", "kl", "difference"], ["bf16", "0", "-"], ["affine:8", "0.00041", "0"]]


def test_a_prefill_under_a_scheme_never_holds_the_scores_of_a_chunk(monkeypatch):
    monkeypatch.setattr(softmax, "TILE", 1 << 21)
    result = peak.run(4096, ["affine:4", "affine:8@2048", "turbo", "turbo@2048"], heads=2)
    full, four, later, turbo, later_turbo = result["rows"]
    assert full["kv_bytes"] > 3 * later["kv_bytes"] > 3 * four["kv_bytes"]
    for row in (four, turbo):
        assert row["prefill_peak_bytes"] - row["kv_bytes"] < result["all_scores_of_a_chunk_bytes"] / 2
    # The first chunk is computed over full precision; the conversion behind it does not wait for the prefill's end.
    for now, then in ((four, later), (turbo, later_turbo)):
        assert now["peak_ratio"] < then["peak_ratio"] <= result["peak_ratio_max"] < 0.75


def test_a_start_that_is_not_reached_measures_nothing():
    with pytest.raises(ValueError, match="quantized nothing"):
        peak.run(64, ["affine:4@100"])


def test_conversion_takes_one_layer_at_a_time():
    caches = [KVCache() for _ in range(8)]
    for number, cache in enumerate(caches):
        mx.eval(cache.update_and_fetch(*mx.random.normal((2, 1, 4, 4096, 64), key=mx.random.key(number))))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    plain = sum(cache.nbytes for cache in caches)
    assert convert(caches, Affine(4, 64), 4096) == 8
    one = caches[0].nbytes
    assert mx.get_peak_memory() - before <= 1.1 * one
    assert mx.get_active_memory() <= before - plain + 8 * one + (1 << 16)
