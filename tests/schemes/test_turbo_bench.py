"""``mlx_lm.tiered bench turboquant`` with small numbers, and what a trained model says of TurboQuant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from families import write_model_dir
from mlx_lm.models.cache import KVCache, make_prompt_cache
from scheme_runs import forget_models
from support.models import TINY

from mlx_lm_tiered.bench import in_process, needle, turboquant
from mlx_lm_tiered.bench.quality import Quality

BYTES = {"bf16": 512, "affine:8": 272, "affine:4": 144, "turbo": 200, "turbo:k5v3@20": 152}


def test_its_rows(tmp_path):
    """Gate 5: measured bytes; 2.5 times the context in those of bf16."""
    model, file = write_model_dir("dense64", tmp_path / "model"), tmp_path / "rows.json"
    flags = ["--schemes", ",".join(BYTES), "--text-tokens", "100", "--context", "2500", "--json", str(file)]
    command = [sys.executable, "-m", "mlx_lm_tiered.cli", "bench", "turboquant", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    result = json.loads(file.read_text())
    rows = {row["scheme"]: row for row in result["rows"]}
    assert {name: row["bytes_per_token_per_head"] for name, row in rows.items()} == BYTES, "schemes are named as on the command line"
    assert result["context"] == 2560 and result["head_dim"] == 128
    for row in rows.values():
        size = row["bytes_per_token_per_head"]
        # No piece of 256 tokens more would fit.
        assert row["tokens"] * size <= 2560 * 512 < (row["tokens"] + 256) * size
        assert row["context_ratio"] == row["tokens"] / 2560 and row["ratio_to_bf16"] == pytest.approx(512 / size)
    assert rows["turbo"]["context_ratio"] >= 2.5
    # The model's heads of 64; its own precision is fp32.
    assert [rows[name]["model_bytes_per_token_per_head"] for name in ("bf16", "turbo", "turbo:k5v3@20")] == [512, 100, 76]
    assert rows["bf16"]["kl"] == 0 and rows["bf16"]["top1"] == 1 and rows["bf16"]["rel_l2"] < 0.01
    assert 0 < rows["affine:8"]["kl"] < rows["turbo"]["kl"] and rows["turbo"]["top1"] < 1
    assert rows["turbo"]["cosine"] > 0.975 and 0.15 < rows["turbo"]["rel_l2"] < 0.2 and 0.1 < rows["affine:4"]["rel_l2"] < 0.15


def test_a_scheme_that_the_model_cannot_have_is_not_measured_as_another():
    """The plugin would keep full precision, whose divergence is 0."""
    for bench in (turboquant, needle):
        with pytest.raises(ValueError, match="heads of 32 have no TurboQuant form"):
            bench.run(TINY["llama"], ["bf16", "turbo"])
    with pytest.raises(ValueError, match="config is a scheme for each layer"):
        turboquant.run(TINY["llama"], ["config"])


def test_divergence_on_a_trained_model(tmp_path):
    """Gate 4: 3 to 5 times per bit of values, k8v3 below 4 affine bits, k8v8 about 8 of them.

    The affine bits are those of the layers with full attention alone, which TurboQuant is for.
    """
    forget_models()
    texts = ["turbo:k8v8", "turbo:k8v4", "turbo:k8v3", "turbo:k8v2"]
    _, first = in_process.named(texts)[0]
    model, tokenizer = in_process.loaded(TINY["gemma4_text"], [first])
    full = [index for index, cache in enumerate(make_prompt_cache(model)) if type(cache) is KVCache]
    for bits in (8, 4):
        (tmp_path / f"{bits}.json").write_text(json.dumps([{"layer_idx": index, "bits": bits, "group_size": 64} for index in full]))
        texts.append(f"config:{tmp_path / f'{bits}.json'}")
    quality = Quality(model, tokenizer, [first], 400)
    k8v8, k8v4, k8v3, k8v2, affine_8, affine_4 = (quality.of(spec)[0]["kl"] for _, spec in in_process.named(texts))
    assert 3 < k8v3 / k8v4 < 5 and 3 < k8v2 / k8v3 < 5
    assert k8v3 < affine_4 and 0.3 < k8v8 / affine_8 < 1.5
