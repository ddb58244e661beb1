"""The parts of ``mlx_lm.tiered bench kernels`` that run without a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_lm_tiered.bench import decode_model, kernels
from mlx_lm_tiered.cli import main
from mlx_lm_tiered.kernels import choice
from mlx_lm_tiered.kernels.check import Format

needs_no_cuda = pytest.mark.skipif(choice.available(), reason="it would run for minutes")


@needs_no_cuda
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "need a GPU" in capsys.readouterr().err


def test_a_part_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(choice, "available", lambda: True)
    assert main(["bench", "kernels", "steps", "stairs"]) == 2
    assert "no part stairs" in capsys.readouterr().err


@needs_no_cuda
def test_a_self_test_that_cannot_run_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "forms", lambda: [Format(4, 64, 128, 4, mx.bfloat16, mx.bfloat16)])
    rows = kernels.self_test()
    assert rows and not any(row["ok"] for row in rows) and all(row["raised"] for row in rows)


def test_steps_are_timed_by_format(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CALLS": 2, "REPEATS": 1, "BEYOND_CACHE": 1}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "_kernel", lambda bits, group, tuning: lambda q, pair: q + 0)
    rows = kernels.run([64], [(4, 64)])
    assert [row["format"] for row in rows] == ["bf16 sdpa", "affine:4:64", "mlx-lm affine:4:64, full cache"]
    assert all(row["us"] > row["build_us"] > 0 and not row["raised"] for row in rows)
    full, quantized = rows[0]["us"] * rows[0]["tb_s"], rows[1]["us"] * rows[1]["tb_s"]
    assert quantized / full == pytest.approx(0.28125)


def test_steps_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 1, "ROUNDS": 2, "VOCABULARY": 64}.items():
        monkeypatch.setattr(decode_model, name, value)
    result = decode_model.run([32], ["bf16", "affine:4"], layers=2, hidden=64)
    assert [row["scheme"] for row in result["rows"]] == ["bf16", "affine:4"] and result["failed"] == 0
    assert result["rows"][0]["ratio_to_first"] == 1 and all(row["ms_per_token"] > 0 for row in result["rows"])
