"""What serves a decode step: the kernel where its self-test passes, otherwise what served it before, with one warning."""

from __future__ import annotations

import logging
import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base

from mlx_lm_tiered.kernels import check, choice, decode, tuning
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.schemes import attention
from mlx_lm_tiered.statistics import Statistics

UPSTREAM = base.quantized_scaled_dot_product_attention
SCALE = 0.18


def step(bits: int = 8, dtype: mx.Dtype = mx.float32, length: int = 1) -> dict[str, Any]:
    mx.random.seed(1)
    q = mx.random.normal((2, 4, length, 64)).astype(dtype)
    keys, values = (mx.quantize(mx.random.normal((2, 2, 40, 64)).astype(dtype), group_size=32, bits=bits) for _ in range(2))
    return {"queries": q, "q_keys": keys, "q_values": values, "scale": SCALE, "mask": None, "group_size": 32, "bits": bits}


def plainly(q: mx.array, keys: Any, values: Any, scale: float, mask: Any, bits: int, group_size: int, tuned: Any = None) -> mx.array:
    """In place of the GPU, which is not here: the right numbers."""
    return check.reference(q, keys, values, scale, mask, bits, group_size).astype(q.dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if mlx reached a GPU by CUDA."""
    monkeypatch.setattr(choice, "available", lambda: True)


def faults(statistics: Statistics) -> Kernels:
    return Kernels("auto", lambda text: statistics.fault("decode_kernel", text))


def test_a_kernel_that_does_not_compile_is_off_with_one_warning(device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def compiler(*arguments: Any) -> mx.array:
        raise RuntimeError("nvrtc: no such architecture")

    monkeypatch.setattr(check, "decode", compiler)
    statistics = Statistics()
    kernels = faults(statistics)
    attend = attention.build(UPSTREAM, kernels)
    with caplog.at_level(logging.WARNING, "mlx_lm_tiered"):
        for bits in (8, 8, 4, 4):
            assert np.array_equal(attend(**step(bits)), UPSTREAM(**step(bits)))
    assert len(caplog.records) == 1 and "no such architecture" in caplog.text
    assert kernels.failed == 2 and statistics.report()["faults"] == {"decode_kernel": 2}


@pytest.mark.parametrize("wrong", [lambda y: y * 1.01, lambda y: y + mx.array(float("nan")), lambda y: y[::-1]])
def test_a_kernel_with_other_numbers_is_off(device: None, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(check, "decode", lambda *arguments: wrong(plainly(*arguments)))
    monkeypatch.setattr(choice, "decode", lambda *arguments: pytest.fail("it served"))
    statistics = Statistics()
    kernels = faults(statistics)
    assert np.array_equal(attention.build(UPSTREAM, kernels)(**step()), UPSTREAM(**step()))
    assert kernels.failed == 1 and statistics.report()["faults"] == {"decode_kernel": 1}


def test_a_kernel_that_passes_serves_what_it_supports(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tests, served = [], []
    monkeypatch.setattr(check, "decode", lambda *arguments: (tests.append(arguments[7]), plainly(*arguments))[1])
    monkeypatch.setattr(choice, "decode", lambda *arguments: (served.append(arguments[5]), plainly(*arguments))[1])
    kernels = Kernels()
    attend = attention.build(UPSTREAM, kernels)
    for dtype in (mx.float32, mx.float32, mx.bfloat16):
        got, want = (f(**step(dtype=dtype)).astype(mx.float32) for f in (attend, UPSTREAM))
        assert mx.abs(got - want).max().item() < (1e-5 if dtype == mx.float32 else 0.06)
    # What is tested is compiled as what serves.
    used = tuning.choose(40, 4, 8, 64, 2)
    assert [(t.warps, t.resident) for t in tests] == [(used.warps, used.resident)] * 2 and served == [8, 8, 8]
    # Several queries and sinks are computed otherwise.
    assert np.array_equal(attend(**step(length=3)), UPSTREAM(**step(length=3)))
    attend(**step(), sinks=mx.zeros(4))
    assert served == [8, 8, 8] and kernels.failed == 0


@pytest.mark.parametrize("pays", [True, False])
def test_on_metal_it_serves_where_it_is_not_slower(device: None, monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(choice, "dialect", lambda: "metal")
    monkeypatch.setattr(check, "decode", plainly)
    asked, served = [], []
    monkeypatch.setattr(choice, "decode", lambda *arguments: (served.append(arguments[5]), plainly(*arguments))[1])
    monkeypatch.setattr(choice, "faster", lambda form: (asked.append(form.bits), pays)[1])
    statistics = Statistics()
    kernels = faults(statistics)
    attend = attention.build(UPSTREAM, kernels)
    for bits in (8, 8, 4):
        assert mx.abs(attend(**step(bits)) - UPSTREAM(**step(bits))).max().item() < 1e-5
    assert asked == [8, 4] and served == ([8, 8, 4] if pays else []) and kernels.slower == (0 if pays else 2) and kernels.failed == 0 and statistics.report()["faults"] == {}


def test_what_is_timed_is_attention_and_the_slower_one_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TIMED_TOKENS": 64, "CALLS": 1, "REPEATS": 3}.items():
        monkeypatch.setattr(check, name, value)
    one = step()
    arguments = (one["queries"], one["q_keys"], one["q_values"], SCALE)
    assert mx.abs(check.stock(*arguments, 8, 32) - check.reference(*arguments, None, 8, 32)).max().item() < 1e-5
    form = check.Format(8, 32, 64, 2, mx.float32, mx.float32)
    monkeypatch.setattr(check, "decode", lambda q, *rest: q)
    assert check.faster(form)
    monkeypatch.setattr(check, "decode", lambda q, *rest: (time.sleep(0.1), q)[1])
    assert not check.faster(form)


def test_a_small_cache_is_not_the_metal_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx would pass it in another address space. A mask with a cache of more elements may still be too small."""
    monkeypatch.setattr(decode, "dialect", lambda: "metal")
    for slots, dim, masked, supported in ((7, 64, False, False), (8, 64, False, True), (7, 128, False, True), (7, 128, True, False), (8, 128, True, True)):
        side = mx.quantize(mx.zeros((1, 1, slots, dim)), group_size=64, bits=8)
        mask = mx.ones((slots,), mx.bool_) if masked else None
        assert decode.supports(mx.zeros((1, 1, 1, dim)), side, side, 8, 64, mask, None) == supported


def test_what_is_not_supported() -> None:
    one = step()
    asked = (one["queries"], one["q_keys"], one["q_values"], 8, 32)
    assert decode.supports(*asked, None, None) and decode.supports(*asked, "causal", None)
    assert decode.supports(*asked, mx.ones((2, 1, 1, 40), mx.bool_), None) and decode.supports(*asked, mx.ones((40,), mx.bool_), None)
    for mask in (mx.ones((2, 4, 1, 40), mx.bool_), mx.ones((2, 1, 1, 39), mx.bool_), mx.zeros((2, 1, 1, 40)), "other"):
        assert not decode.supports(*asked, mask, None)
    assert not decode.supports(*asked, None, mx.zeros(4))
    assert not decode.supports(*asked[:3], 7, 32, None, None) and not decode.supports(*asked[:3], 8, 64, None, None)


def test_off_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step()
    arguments = (one["queries"], one["q_keys"], one["q_values"], SCALE, None, None, 8, 32)
    monkeypatch.setattr(choice, "available", lambda: False)
    assert Kernels().state == "none for this device" and Kernels().attend(*arguments) is None
    monkeypatch.setattr(choice, "available", lambda: True)
    monkeypatch.setattr(check, "decode", plainly)
    monkeypatch.setattr(choice, "decode", plainly)
    assert Kernels("off").state == "off" and Kernels("off").attend(*arguments) is None
    assert Kernels().state == "on" and Kernels().attend(*arguments) is not None


@pytest.mark.parametrize(("tokens", "units", "bits", "splits"), [(16384, 8, 8, 33), (65536, 8, 8, 49), (65536, 8, 4, 66), (65536, 32, 4, 16), (100, 8, 8, 2), (1, 8, 8, 1), (16384, 900, 4, 1)])
def test_splits_fill_the_device_but_no_warp_is_idle(tokens: int, units: int, bits: int, splits: int) -> None:
    found = tuning.choose(tokens, units, bits, 128, 4)
    assert found.splits == splits and (found.splits - 1) * found.warps * tuning.TOKENS < tokens
    assert tuning.choose(tokens, units, bits, 256, 4).resident == 0 == tuning.choose(tokens, units, bits, 128, 8).resident
    assert found.splits <= decode.MOST_SPLITS


def test_splits_on_metal() -> None:
    assert [tuning.choose(tokens, 8, 4, 128, 4, "metal").splits for tokens in (1, 600, 2048, 65536)] == [1, 10, 32, 32]
    assert tuning.choose(65536, 900, 4, 128, 4, "metal") == tuning.Tuning(4, 1, 0)
