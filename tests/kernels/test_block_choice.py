"""Whether attention over blocks goes through the kernel, its self-test, and what mlx is told to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import block_dialects
import mlx.core as mx
import numpy as np
import pytest

from mlx_lm_tiered.kernels import block_check, blocks, choice
from mlx_lm_tiered.kernels.blocks import Form
from mlx_lm_tiered.kernels.choice import Kernels

SCALE = 0.2
LENGTHS = (5, 40)


def arguments(dim: int = 64, length: int = 1, dtype: mx.Dtype = mx.float32, heads_first: bool = False) -> dict[str, Any]:
    """A step of two rows with 4 query and 2 KV heads."""
    form = Form(dim, 2, 16, dtype, SCALE, length, heads_first)
    keys, values, table, lengths = block_check.pools(form, LENGTHS, 2)
    q = mx.random.normal((2, 4, length, dim), key=mx.random.key(3)).astype(dtype)
    return {"queries": q, "keys": keys, "values": values, "table": table, "lengths": lengths, "scale": SCALE, "block": 16 if heads_first else None}


def plainly(q: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, scale: float, block: int | None = None, *rest: Any) -> mx.array:
    """In place of the GPU, which is not here: the right numbers."""
    numbers = tuple(int(n) for n in lengths.tolist()[: q.shape[0]])
    return block_check.reference(blocks.form_of(q, keys, scale, block), q, keys, values, table, numbers).astype(q.dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if mlx reached a GPU by CUDA."""
    monkeypatch.setattr(choice, "available", lambda: True)
    monkeypatch.setattr(block_check, "decode", plainly)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Form, int | None]]:
    """Steps that are computed plainly, and told of."""
    found: list[tuple[Form, int | None]] = []

    def step(rows: int, kv_heads: int, form: Form) -> Any:
        def run(q: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, longest: int | None) -> mx.array:
            found.append((form, longest))
            return plainly(q, keys, values, table, lengths, form.scale, form.block if form.heads_first else None)

        return run

    monkeypatch.setattr(blocks, "step", step)
    return found


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_the_reference_is_attention_over_each_row_s_tokens(block: int, heads_first: bool) -> None:
    form = Form(64, 2, block, mx.float32, SCALE, 2, heads_first)
    keys, values, table, _ = block_check.pools(form, LENGTHS, 2)
    q = mx.random.normal((2, 4, 2, 64))
    got = block_check.reference(form, q, keys, values, table, LENGTHS)
    for row, n in enumerate(LENGTHS):
        k, v = (block_check.gathered(form, arena, table[row : row + 1], n) for arena in (keys, values))
        assert k.shape == (1, 2, n, 64) and mx.isfinite(k).all().item()
        want = mx.fast.scaled_dot_product_attention(q[row : row + 1], k, v, scale=SCALE, mask="causal")
        assert mx.abs(got[row] - want[0]).max().item() < 1e-5


def test_a_kernel_that_passes_serves(device: None, served: list[Any]) -> None:
    kernels = Kernels()
    for given in (arguments(), arguments(), arguments(length=3), arguments(heads_first=True)):
        got = kernels.attend_blocks(**given, longest=40)
        assert got is not None and np.array_equal(got, plainly(*given.values()))
    base = Form(64, 2, 16, mx.float32, SCALE)
    assert served == [(base, 40), (base, 40), (base._replace(length=3), 40), (base._replace(heads_first=True), 40)] and kernels.failed == 0


@pytest.mark.parametrize(
    "wrong", [lambda y: y * 1.01, lambda y: y[::-1], lambda y: mx.where(mx.arange(y.size).reshape(y.shape) == 3, mx.nan, y), lambda y: mx.reshape(y, (7,))]
)
def test_a_wrong_kernel_is_off_with_one_fault(device: None, served: list[Any], monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(block_check, "decode", lambda *a: wrong(plainly(*a)))
    faults: list[str] = []
    kernels = Kernels("auto", faults.append)
    assert kernels.attend_blocks(**arguments()) is None and kernels.attend_blocks(**arguments()) is None
    assert len(faults) == 1 == kernels.failed and "blocks of 16 tokens in heads of 64 is off" in faults[0] and served == []


def test_the_self_test_sees_a_token_that_is_not_the_row_s(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(64, 2, 16, mx.float32, SCALE)
    assert block_check.right(form) and block_check.right(form._replace(length=4))
    for others in (1, -1):

        def wrong(q: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, *rest: Any, others: int = others) -> mx.array:
            return plainly(q, keys, values, table, mx.maximum(lengths + others, 1), *rest)

        monkeypatch.setattr(block_check, "decode", wrong)
        assert not block_check.right(form)


def test_off_no_device_and_what_is_not_supported(device: None, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kernels("off").attend_blocks(**arguments()) is None
    one = arguments()
    others = [arguments(length=9), arguments(dim=32), one | {"values": one["values"][:, :, :, :32]}, one | {"queries": one["queries"].astype(mx.float16)}]
    others += [one | {"table": one["table"].astype(mx.uint32)}, one | {"lengths": one["lengths"][:1]}, one | {"queries": mx.zeros((2, 3, 1, 64))}, one | {"block": 16}]
    others += [arguments(heads_first=True) | {"block": 7}, one | {"queries": mx.zeros((2, 34, 1, 64))}]
    kernels = Kernels()
    assert [kernels.attend_blocks(**other) for other in others] == [None] * len(others) and served == [] and kernels.failed == 0
    monkeypatch.setattr(choice, "available", lambda: False)
    assert Kernels().attend_blocks(**one) is None


@pytest.mark.parametrize("pays", [True, False])
def test_on_metal_it_serves_where_it_is_not_slower(device: None, served: list[Any], monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    monkeypatch.setattr(choice, "dialect", lambda: "metal")
    monkeypatch.setattr(block_check, "faster", lambda form: pays)
    kernels = Kernels()
    assert (kernels.attend_blocks(**arguments()) is not None) == pays and len(served) == pays
    assert kernels.failed == 0 and kernels.slower == (0 if pays else 1)


def test_what_is_timed_is_the_kernel_against_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_check, "TIMED_TOKENS", 48)
    form, seen = Form(64, 2, 16, mx.float32, SCALE), []

    def seconds(attend: Any) -> float:
        seen.append(np.array(attend()))
        return len(seen)

    monkeypatch.setattr(block_check, "decode", plainly)
    monkeypatch.setattr(block_check, "seconds", seconds)
    assert block_check.faster(form) and np.abs(seen[0] - seen[1]).max() < 1e-5


def test_tables_are_long_enough_to_be_in_the_device_s_memory() -> None:
    assert blocks.on_device([7]).tolist() == [7, 0, 0, 0, 0, 0, 0, 0] and blocks.on_device(list(range(9))).tolist() == list(range(9))
    made = blocks.on_device([[1, 2], [3, 4]])
    assert made.shape == (2, 8) and made.dtype == mx.int32 and made[:, :2].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("tokens", "units", "splits"), [(4096, 8, 49), (1024, 8, 16), (1, 8, 1), (65536, 32, 12), (65536, 900, 1)])
def test_splits_fill_the_device_but_no_warp_is_idle(tokens: int, units: int, splits: int) -> None:
    assert blocks.choose(tokens, units, Form(128, 4, 256, mx.bfloat16, SCALE)) == (4, splits, 3)


def test_what_a_block_of_threads_may_have() -> None:
    for language, most in (("cuda", 48 << 10), ("metal", 32 << 10)):
        for dim in blocks.DIMS:
            for each in (1, 4, 5, 16):
                for dtype in (mx.float32, mx.bfloat16):
                    form = Form(dim, each, 16, dtype, SCALE)
                    found = blocks.options(language, 2, 2, form, blocks.choose(4096, 4, form, language))
                    warps, queries, sets = found.parts_constants["W"], blocks.queries_of_a_block(form), 2 if dtype == mx.float32 else 1
                    # As in blocks.body: outputs and what belongs to them, and queries.
                    merging = 4 * (queries * 129 + 1) if blocks.merged(language, form) else 0
                    assert warps * queries * (dim + 8 + 2) * 4 + sets * 8 * (dim // 2 + 8) * 4 + merging <= most and warps in (1, 2, 4)
                    assert found.merge["threadgroup"][0] == 4 * dim <= 1024


def test_a_step_is_put_to_metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it that mlx does before a GPU's part begins; and one text whatever the table's room."""
    monkeypatch.setattr(blocks, "dialect", lambda: "metal")
    form = Form(64, 2, 16, mx.bfloat16, SCALE, 2)
    assert len({block_dialects.written(form, rows, splits, room)[0].text for rows, splits, room in ((1, 8, 8), (2, 64, 300))}) == 1
    blocks.step.cache_clear()
    shapes = []

    def step(q: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array) -> mx.array:
        assert blocks.supports(q, keys, values, table, lengths)
        out = blocks.decode(q, keys, values, table, lengths, 0.1)
        shapes.append((out.shape, out.dtype))
        return out

    arena = mx.zeros((4, 2, 16, 64), mx.bfloat16)
    mx.export_function(str(tmp_path / "step.mlxfn"), step, mx.zeros((1, 4, 2, 64), mx.bfloat16), arena, arena, mx.zeros((1, 3), mx.int32), mx.zeros((1,), mx.int32))
    blocks.step.cache_clear()
    assert shapes == [((1, 4, 2, 64), mx.bfloat16)]
