"""``mlx_lm.tiered bench paged`` with small numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlx_lm_tiered.bench import exact, paged
from support.models import TINY


def test_its_figures(tmp_path):
    file = tmp_path / "figures.json"
    flags = ["--context", "200", "--longest", "256", "--shared", "300", "--own", "20", "--decode-tokens", "4", "--block", "16", "--repeats", "2", "--json", str(file)]
    command = [sys.executable, "-m", "mlx_lm_tiered.cli", "bench", "paged", "--model", str(TINY["llama"]), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    found = json.loads(file.read_text())
    assert found["decode_ratio_b1"] > 0.3 and found["decode_ratio_b1_min"] <= found["decode_ratio_b1"] <= found["decode_ratio_b1_max"]
    # A block that is not full for each row, and one that the prompt ends in.
    assert 1 <= found["mixed_lengths_kv_ratio"] < 1.2 < found["mixed_lengths_padded_ratio"]
    assert 1 <= found["shared_prefix_kv_ratio"] < 1.8 and found["shared_prefix_ttft_ratio"] < 1


def test_logits_are_those_of_plain_caches_bit_for_bit(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "mlx_lm_tiered.cli", "bench", "paged", "--exact", "--model", str(TINY["llama"]), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    found = json.loads(file.read_text())
    assert found["differing"] == found["furthest"] == 0 and found["logits"] > 1e6
    assert {row["block"] for row in found["rows"]} == {1, 16, 256} and {255, 256, 257, 512, 513} < {row["prompt"] for row in found["rows"]}


def test_a_logit_that_differs_is_told():
    assert exact.found({"differing": 0, "logits": 5, "furthest": 0.0}) == []
    assert exact.found({"differing": 2, "logits": 5, "furthest": 0.25}) == ["2 of 5 logits differ, by up to 0.25"]


@pytest.mark.parametrize("scheme, ratio", (("bf16", 1), ("affine:4", 0.28125)))
def test_steps_of_random_weights(scheme: str, ratio: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged, "STEPS", 4)
    found = paged.steps([300], layers=1, hidden=128, block=16, repeats=1, scheme=scheme, longest=96)
    (row,) = found["rows"]
    assert row["tokens"] == 300 and min(row["decode_ratio_b1"], row["pieces_ratio"]) > 0.1 and found["faults"] == []
    assert found["token_bytes_ratio"] == ratio and found["rows_ratio"] > 0.05 and found["rows_furthest_logit"] < 0.05


def test_its_figures_under_a_scheme():
    compared = exact.run(TINY["llama"], (16,), "affine:4:32")
    assert compared["differing"] == 0 and compared["logits"] > 1e5
    found = paged.run(TINY["llama"], 100, 128, 150, 20, 4, 16, 1, scheme="affine:4:32")
    assert found["token_bytes_ratio"] == 0.1875 and 1 <= found["mixed_lengths_kv_ratio"] < 1.3 < found["mixed_lengths_padded_ratio"] and found["shared_prefix_kv_ratio"] < 1.8
    with pytest.raises(ValueError, match="affine:4:32@9 begins at token 9"):
        paged.run(TINY["llama"], scheme="affine:4:32@9")
