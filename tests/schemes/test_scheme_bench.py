"""``mlx_lm.tiered bench schemes`` with small numbers."""

from __future__ import annotations

from mlx_lm_tiered.bench import schemes
from support.models import TINY


def test_its_rows_tell_schemes_apart():
    result = schemes.run(TINY["llama"], ["bf16", "affine:8:32", "affine:3:32@20"], tokens=60, decode_tokens=2, repeats=2, text_tokens=160)
    full, eight, three = result["rows"]
    assert full["kl"] == 0 and full["top1"] == 1 and full["decode_ratio_to_bf16"] == 1
    assert 0 < eight["kl"] < 0.01 < three["kl"] and three["top1"] < 1
    assert full["bytes_per_token"] > eight["bytes_per_token"] > three["bytes_per_token"]
    assert eight["decode_ratio_to_upstream"] > 0 and three["decode_ratio_to_upstream"] is None
    assert all(row["prefill_peak_bytes"] > 0 and row["decode_peak_bytes"] > 0 for row in result["rows"])
    assert eight["logit_difference_to_upstream"] == 0 and eight["tiled_logit_difference"] < 1
    assert "logit_difference_to_upstream" not in three, "whose width and start mlx-lm does not have"
