"""The parts of ``mlx_lm.tiered bench kernels`` that run without a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_tiered.bench import block_kernels, decode_model, kernels
from mlx_lm_tiered.cli import main
from mlx_lm_tiered.kernels import choice
from mlx_lm_tiered.kernels.layout import Layout

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
    monkeypatch.setattr(kernels, "forms", lambda: [kernels.form_of(Layout.affine(4, 64)), kernels.form_of(Layout.turboquant(8, 3))])
    rows = kernels.self_test()
    assert rows and not any(row["ok"] for row in rows) and all(row["raised"] for row in rows)


def test_steps_are_timed_by_format(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CALLS": 2, "REPEATS": 1, "BEYOND_CACHE": 1, "PASS": 1 << 20}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "_kernel", lambda layout, tuning: lambda q, pair: q + 0)
    rows = kernels.run([64])
    assert [row["scheme"] for row in rows] == ["bf16", "affine:8", "mlx-lm affine:8, full cache", "affine:4", "mlx-lm affine:4, full cache", "turbo"]
    assert all(row["us"] > row["build_us"] > 0 and row["of_limit"] > 0 and not row["raised"] for row in rows)
    sizes = {row["scheme"]: row["us"] * row["tb_s"] for row in rows}
    assert [sizes[name] / sizes["bf16"] for name in ("affine:4", "turbo")] == pytest.approx([0.28125, 0.390625])


def test_a_chunk_of_a_prefill_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 32, "REPEATS": 1}.items():
        monkeypatch.setattr(kernels, name, value)
    rows = kernels.prefill([96])
    assert [row["scheme"] for row in rows] == ["bf16", "affine:8", "affine:4", "turbo"] and all(row["ms"] > 0 for row in rows)
    # The outputs, at least.
    assert all(row["peak_bytes"] >= 32 * 32 * 128 * 2 for row in rows)


def test_steps_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 1, "ROUNDS": 2, "VOCABULARY": 64}.items():
        monkeypatch.setattr(decode_model, name, value)
    result = decode_model.run([32], ["bf16", "affine:4", "turbo"], layers=2, hidden=64)
    assert [(row["batch"], row["scheme"]) for row in result["rows"]] == [(batch, name) for batch in (False, True) for name in ("bf16", "affine:4", "turbo")] and result["failed"] == 0
    assert result["rows"][0]["ratio_to_first"] == 1 and all(row["ms_per_token"] > 0 for row in result["rows"])


def test_attention_over_blocks_is_tested_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"CALLS": 2, "REPEATS": 1, "HEADS": 8, "KV_HEADS": 2, "DIM": 64}.items():
        monkeypatch.setattr(kernels, name, value)
    small = {"HEADS": 8, "KV_HEADS": 2, "DIM": 64, "BEYOND_CACHE": 1, "MIXED": (16, 40), "SHAPES": ((2, 6), (4, 3)), "SPLITS": (1, 2, 33), "TOKENS": 4, "CONTEXTS": (64,)}
    for name, value in small.items():
        monkeypatch.setattr(block_kernels, name, value)
    asked = []

    def attend(q: mx.array, *pool: Any) -> mx.array:
        asked.append((q.shape, pool[-1]))
        return q + 0

    monkeypatch.setattr(block_kernels.blocks, "decode", attend)
    monkeypatch.setattr(block_kernels, "forms", lambda: [block_kernels.form_of(64, 2, 16)])
    monkeypatch.setattr(block_kernels.block_check, "decode", lambda q, *rest: q)
    rows = block_kernels.run([64])
    assert [row["what"] for row in rows] == ["64 plain, sdpa", "64 blocks", "2 rows of 16 to 40", "16384 blocks, 4 queries"]
    assert all(row["us"] > row["build_us"] > 0 and row["tb_s"] > 0 and not row["ok"] for row in rows) and "heads first" not in capsys.readouterr().out
    assert {shape for shape, _ in asked} == {(1, 8, 1, 64), (2, 8, 1, 64), (1, 8, 4, 64)}
    asked.clear()
    found = block_kernels.sweep([64])
    assert {(row["warps"], row["splits"], row["resident"]) for row in found} == {(2, 1, 6), (2, 2, 6), (4, 1, 3), (4, 2, 3)}
    assert {tuning for _, tuning in asked} == {(row["warps"], row["splits"], row["resident"]) for row in found}
