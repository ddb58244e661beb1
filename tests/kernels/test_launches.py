"""What a call hands to mlx on CUDA, where no test runs a kernel: as many inputs as the text names, in its order, and counters in turns."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from plain import affine, turbo

from mlx_lm_tiered.kernels import blocks, check, decode, source


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, mx.array]]:
    calls: list[dict[str, mx.array]] = []

    def kernel(dialect: str, names: Any, named: Any, inputs: Any, outputs: Any, bounds: Any = (0, 0)) -> Any:
        def call(inputs_: tuple[str, ...] = inputs, **given: Any) -> list[mx.array]:
            calls.append(dict(zip(inputs_, given["arrays"], strict=True)))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

        return lambda inputs, grid, threadgroup, output_shapes, output_dtypes: call(arrays=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes)

    monkeypatch.setattr(source, "kernel", kernel)
    for module in (decode, blocks):
        monkeypatch.setattr(module, "dialect", lambda: "cuda")
    return calls


@pytest.mark.parametrize("shape", [affine(4, 64, 128), turbo(8, 3, 128), affine(8, 64, 512, each=2), turbo(8, 3, 512, each=1), affine(4, 64, 128, masked=True)], ids=str)
@pytest.mark.parametrize("records", [False, True])
def test_decoding(asked: list[dict[str, mx.array]], shape: Any, records: bool) -> None:
    form = shape.form._replace(records=records)
    q, (k, v) = mx.zeros((1, 2 * shape.each, 1, shape.dim)), (mx.zeros((1, 2, 40, shape.dim), shape.scales) for _ in range(2))
    keys, values = check.sides(k, v, shape.layout, 40)
    step = decode.Step(1, 2, form)
    mask = mx.ones((1, 1, 1, 40), mx.bool_) if shape.masked else None
    for _ in range(2):
        out = step.over_records(q, form.record.join(list(zip(keys, values, strict=True))), 40, mask) if records else step(q, keys, values, 40, mask)
        assert out.shape == q.shape and out.dtype == shape.queries
    alone = shape.dim <= decode.CHUNK
    assert len(asked) == (2 if alone else 4) and all(call["mask"].shape == (1, 1, 1, 40) for call in asked if "mask" in call)
    first, second = [call for call in asked if "q" in call]
    assert ("kv" in first) == records and ("signs" in asked[-1]) == shape.layout.turbo
    assert not alone or (first["done"] is not second["done"] and first["done"].size >= decode.LEAST_COUNTERS and not first["done"].any())


@pytest.mark.parametrize("shape", [affine(4, 64, 128), turbo(8, 3, 128), affine(8, 64, 512, each=2)], ids=str)
def test_decoding_over_blocks_of_records(asked: list[dict[str, mx.array]], shape: Any) -> None:
    form = shape.form._replace(records=True, block=16)
    held, q = mx.zeros((1, 2, 64, form.record.words), mx.uint32), mx.zeros((2, 2 * shape.each, 1, shape.dim))
    table, lengths = blocks.on_device([[0, 1], [2, 3]]), blocks.on_device([20, 31])
    assert decode.supports_listed(q, held, form.record, table, lengths, 16)
    for longest in (31, 60):
        assert decode.decode_listed(q, held, form.record, table, lengths, 0.1, 16, longest).shape == q.shape
    first, second = [call for call in asked if "q" in call]
    assert first["listed"] is second["listed"] is table and first["lengths"] is lengths and first["kv"] is held and "mask" not in first
    wrong = [(q, held, table, lengths, 15), (q, held, table.astype(mx.int64), lengths, 16), (q, held, table, lengths[:1], 16), (mx.zeros((2, 4, 2, shape.dim)), held, table, lengths, 16)]
    assert not any(decode.supports_listed(a, b, form.record, *others) for a, b, *others in wrong)


@pytest.mark.parametrize("dim", [80, 128])
def test_blocks(asked: list[dict[str, mx.array]], dim: int) -> None:
    arena, q = mx.zeros((1, 2, 64, dim), mx.bfloat16), mx.zeros((2, 8, 1, dim), mx.bfloat16)
    table, lengths = blocks.on_device([[0, 1], [2, 3]]), blocks.on_device([20, 31])
    step = blocks.Step(2, 2, blocks.form_of(q, arena, 0.1, 16))
    for _ in range(2):
        out = step(q, arena, arena, table, lengths)
        assert out.shape == q.shape and out.dtype == q.dtype
    first, second = [call for call in asked if "q" in call]
    assert len(asked) == (2 if dim == 128 else 4) and (dim != 128 or first["done"] is not second["done"]) and first["table"] is table and first["lengths"] is lengths
