"""What serves a decode step: the kernel where its self-test passes, otherwise what served it before, with one warning."""

from __future__ import annotations

import logging
import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base

from mlx_lm_tiered.kernels import blocks, check, choice, decode, tuning
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.kernels.layout import Layout
from mlx_lm_tiered.schemes import attention
from mlx_lm_tiered.schemes.turbo import Pair
from mlx_lm_tiered.statistics import Statistics
from mlx_lm_tiered.turboquant.codec import encode_keys, encode_values

UPSTREAM = base.quantized_scaled_dot_product_attention
SCALE = 0.18
EIGHT, FOUR = Layout.affine(8, 32), Layout.affine(4, 32)
SPLITS = [(4096, 8, 128, 16), (4096, 8, 256, 33), (16384, 8, 64, 33), (65536, 8, 128, 33), (65536, 8, 256, 66), (65536, 32, 128, 8), (100, 8, 128, 1), (130, 8, 128, 2), (1, 8, 128, 1), (16384, 900, 128, 1)]


def step(bits: int = 8, dtype: mx.Dtype = mx.float32, length: int = 1) -> dict[str, Any]:
    mx.random.seed(1)
    q = mx.random.normal((2, 4, length, 64)).astype(dtype)
    keys, values = (mx.quantize(mx.random.normal((2, 2, 40, 64)).astype(dtype), group_size=32, bits=bits) for _ in range(2))
    return {"queries": q, "q_keys": keys, "q_values": values, "scale": SCALE, "mask": None, "group_size": 32, "bits": bits}


def turbo_step(value_bits: int = 3, length: int = 1) -> dict[str, Any]:
    mx.random.seed(1)
    q, k, v = (mx.random.normal(shape) for shape in ((2, 4, length, 64), (2, 2, 40, 64), (2, 2, 40, 64)))
    return {"queries": q, "q_keys": Pair.of(encode_keys(k, 8), 8), "q_values": Pair.of(encode_values(v, value_bits), value_bits), "scale": SCALE, "mask": None}


def plainly(q: mx.array, keys: Any, values: Any, scale: float, mask: Any, layout: Layout, tuned: Any = None) -> mx.array:
    """In place of the GPU, which is not here: the right numbers."""
    return check.reference(q, keys, values, scale, mask, layout).astype(q.dtype)


def serving(monkeypatch: pytest.MonkeyPatch, served: list[Layout], attend: Any = plainly) -> None:
    """Steps that are so computed, and told of."""

    class Step:
        def __init__(self, rows: int, kv_heads: int, form: decode.Format):
            self.form = form

        def __call__(self, q: mx.array, keys: Any, values: Any, slots: int, mask: Any) -> mx.array:
            served.append(self.form.layout)
            keys, values = ([part[:, :, :slots] for part in side] for side in (keys, values))
            return attend(q, keys, values, self.form.scale, mask, self.form.layout)

    monkeypatch.setattr(choice, "Step", Step)


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
    serving(monkeypatch, [], lambda *arguments: pytest.fail("it served"))
    statistics = Statistics()
    kernels = faults(statistics)
    assert np.array_equal(attention.build(UPSTREAM, kernels)(**step()), UPSTREAM(**step()))
    assert kernels.failed == 1 and statistics.report()["faults"] == {"decode_kernel": 1}


def test_a_kernel_that_passes_serves_what_it_supports(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tests, served = [], []
    monkeypatch.setattr(check, "decode", lambda *arguments: (tests.append(arguments[6]), plainly(*arguments))[1])
    serving(monkeypatch, served)
    kernels = Kernels()
    attend = attention.build(UPSTREAM, kernels)
    for dtype in (mx.float32, mx.float32, mx.bfloat16):
        got, want = (f(**step(dtype=dtype)).astype(mx.float32) for f in (attend, UPSTREAM))
        assert mx.abs(got - want).max().item() < (1e-5 if dtype == mx.float32 else 0.06)
    # What is tested is compiled as what serves.
    used = tuning.choose(40, 4, 64, 2)
    assert [(t.warps, t.resident) for t in tests] == [(used.warps, used.resident)] * 2 and served == [EIGHT] * 3
    # Several queries, sinks, and another mask are computed otherwise.
    assert np.array_equal(attend(**step(length=3)), UPSTREAM(**step(length=3)))
    attend(**step(), sinks=mx.zeros(4))
    attend(**step() | {"mask": mx.ones((2, 4, 1, 40), mx.bool_)})
    assert served == [EIGHT] * 3 and kernels.failed == 0
    # And what is served at one length is not at one that is too short for a warp.
    short = step() | {side: tuple(part[:, :, :15] for part in step()[side]) for side in ("q_keys", "q_values")}
    assert np.array_equal(attend(**short), UPSTREAM(**short)) and len(served) == 3


def test_turboquant_is_served_too(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "decode", plainly)
    served: list[Layout] = []
    serving(monkeypatch, served)
    kernels = Kernels()
    attend, without = attention.build(UPSTREAM, kernels), attention.build(UPSTREAM)
    for bits in (3, 8):
        assert mx.abs(attend(**turbo_step(bits)) - without(**turbo_step(bits))).max().item() < 1e-5
    assert served == [Layout.turboquant(8, 3), Layout.turboquant(8, 8)]
    assert np.array_equal(attend(**turbo_step(length=2)), without(**turbo_step(length=2))) and len(served) == 2


@pytest.mark.parametrize("pays", [True, False])
def test_on_metal_it_serves_where_it_is_not_slower(device: None, monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(choice, "dialect", lambda: "metal")
    monkeypatch.setattr(check, "decode", plainly)
    asked, served = [], []
    serving(monkeypatch, served)

    def faster(form: decode.Format, otherwise: Any) -> bool:
        one = step(form.layout.key_bits)
        # What it is compared with is what would serve.
        assert mx.abs(otherwise(one["queries"], one["q_keys"], one["q_values"], SCALE) - UPSTREAM(**one)).max().item() < 1e-5
        asked.append(form.layout)
        return pays

    monkeypatch.setattr(choice, "faster", faster)
    statistics = Statistics()
    kernels = faults(statistics)
    attend = attention.build(UPSTREAM, kernels)
    for bits in (8, 8, 4):
        assert mx.abs(attend(**step(bits)) - UPSTREAM(**step(bits))).max().item() < 1e-5
    assert asked == [EIGHT, FOUR] and served == ([EIGHT, EIGHT, FOUR] if pays else []) and kernels.slower == (0 if pays else 2)
    assert kernels.failed == 0 and statistics.report()["faults"] == {}


def test_what_is_timed_is_one_format_and_the_slower_one_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TIMED_TOKENS": 64, "CALLS": 1, "REPEATS": 3}.items():
        monkeypatch.setattr(check, name, value)
    form = decode.Format(EIGHT, 64, 2, mx.float32, mx.float32, SCALE)
    seen = []

    def otherwise(q: mx.array, keys: Any, values: Any, scale: float) -> mx.array:
        seen.append((q.shape, keys[0].shape, scale))
        time.sleep(0.05)
        return q

    monkeypatch.setattr(check, "decode", lambda q, *rest: q)
    assert check.faster(form, otherwise) and set(seen) == {((1, 16, 1, 64), (1, 8, 64, 16), SCALE)}
    monkeypatch.setattr(check, "decode", lambda q, *rest: (time.sleep(0.2), q)[1])
    assert not check.faster(form, otherwise)


def test_a_small_cache_is_not_the_metal_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx would pass arrays of few elements in another address space."""
    side = mx.quantize(mx.zeros((1, 1, 16, 64)), group_size=64, bits=8)
    asked = (mx.zeros((1, 1, 1, 64)), side, side, 16, Layout.affine(8, 64), mx.ones((16,), mx.bool_), None)
    monkeypatch.setattr(decode, "dialect", lambda: "metal")
    assert decode.supports(*asked)
    monkeypatch.setitem(decode.LEAST_ELEMENTS, "metal", 17)
    assert not decode.supports(*asked)


def test_what_is_not_supported() -> None:
    one = step()
    arrays = (one["queries"], one["q_keys"], one["q_values"])
    assert decode.supports(*arrays, 40, EIGHT, None, None) and decode.supports(*arrays, 40, EIGHT, "causal", None)
    assert decode.supports(*arrays, 40, EIGHT, mx.ones((2, 1, 1, 40), mx.bool_), None) and decode.supports(*arrays, 40, EIGHT, mx.ones((40,), mx.bool_), None)
    for mask in (mx.ones((2, 4, 1, 40), mx.bool_), mx.ones((2, 1, 1, 39), mx.bool_), mx.zeros((2, 1, 1, 40)), "other"):
        assert not decode.supports(*arrays, 40, EIGHT, mask, None)
    assert not decode.supports(*arrays, 40, EIGHT, None, mx.zeros(4))
    for layout in (Layout.affine(7, 32), Layout.affine(8, 64), Layout.turboquant(8, 3), Layout(8, 4, 32)):
        assert not decode.supports(*arrays, 40, layout, None, None)
    for slots, supported in ((15, False), (16, True)):
        short = [tuple(part[:, :, :slots] for part in side) for side in arrays[1:]]
        assert decode.supports(arrays[0], *short, slots, EIGHT, None, None) == supported
    two = turbo_step()
    assert decode.supports(two["queries"], two["q_keys"], two["q_values"], 40, Layout.turboquant(8, 3), None, None)
    assert not decode.supports(two["queries"], two["q_keys"], two["q_values"], 40, EIGHT, None, None)


def test_off_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step()
    arguments = (one["queries"], one["q_keys"], one["q_values"], 40, SCALE, None, None, EIGHT, plainly)
    monkeypatch.setattr(choice, "available", lambda: False)
    assert Kernels().state == "none for this device" and Kernels().attend(*arguments) is None
    monkeypatch.setattr(choice, "available", lambda: True)
    monkeypatch.setattr(check, "decode", plainly)
    serving(monkeypatch, [])
    assert Kernels("off").state == "off" and Kernels("off").attend(*arguments) is None
    assert Kernels().state == "on" and Kernels().attend(*arguments) is not None


@pytest.mark.parametrize(("tokens", "units", "dim", "splits"), SPLITS)
def test_splits_fill_the_device_but_no_warp_is_idle(tokens: int, units: int, dim: int, splits: int) -> None:
    found = tuning.choose(tokens, units, dim, 4)
    assert found.splits == splits and (found.splits - 1) * found.warps * tuning.TOKENS < tokens
    assert tuning.choose(tokens, units, 256, 4).resident == 0 == tuning.choose(tokens, units, 128, 8).resident
    assert found.splits <= decode.MOST_SPLITS


def test_splits_on_metal() -> None:
    assert [tuning.choose(tokens, 8, 128, 4, "metal").splits for tokens in (1, 600, 2048, 65536)] == [1, 10, 32, 32]
    assert tuning.choose(65536, 900, 128, 4, "metal") == tuning.Tuning(4, 1, 0)


def test_records_in_blocks_are_served_where_the_self_test_passes(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(q: mx.array, held: mx.array, record: Any, table: mx.array, lengths: mx.array, scale: float, block: int, longest: int, tuned: Any = None, more: int = 0) -> mx.array:
        out = []
        for row in range(q.shape[0]):
            places = mx.arange(lengths[row].item() + more)
            keys, values = zip(*record.split(mx.take(held, table[row][places // block] * block + places % block, axis=2)), strict=True)
            out.append(check.reference(q[row : row + 1], keys, values, scale, None, record.layout).astype(q.dtype))
        return mx.concatenate(out)

    class Step:
        def __init__(self, rows: int, kv_heads: int, form: decode.Format):
            self.form = form

        def over_blocks(self, q: mx.array, held: mx.array, table: mx.array, lengths: mx.array, longest: int) -> mx.array:
            return gathered(q, held, self.form.record, table, lengths, self.form.scale, self.form.block, longest)

    monkeypatch.setattr(choice, "Step", Step)
    given = step()
    record = decode.record_of(EIGHT, 64, 64, mx.float32)
    records = record.join(list(zip(given["q_keys"], given["q_values"], strict=True)))
    lengths = (40, 21)
    held, table = check.scattered(records, lengths, 16)
    asked = (given["queries"], held, record, table, blocks.on_device(lengths), SCALE, 16, 40)
    for more in (0, 1):
        monkeypatch.setattr(check, "decode_listed", lambda *of, more=more: gathered(*of, more=more))
        kernels = Kernels()
        found = kernels.attend_listed(*asked)
        assert (found is None) == bool(more) and kernels.failed == more
        assert found is None or mx.allclose(found, gathered(*asked))
    # Of several queries a row, and where kernels are off, it is computed otherwise.
    assert Kernels().attend_listed(mx.zeros((2, 4, 2, 64)), *asked[1:]) is None and Kernels("off").attend_listed(*asked) is None
