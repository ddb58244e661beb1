"""The decode kernel in the dialects that run here, plain C++ and imitated Metal, against attention over dequantized keys and values in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import metal
import mlx.core as mx
import numpy as np
import plain
import pytest
from plain import Shape, affine, turbo

from mlx_lm_tiered.kernels import blocks, check
from mlx_lm_tiered.kernels.records import Record
from mlx_lm_tiered.kernels.tuning import Tuning

WIDTHS = [affine(bits, 64, 128) for bits in (2, 3, 4, 5, 6, 8)]
GROUPS = [affine(bits, 32, 96, each=2) for bits in (3, 4, 5)] + [affine(bits, 128, 128, each=8, warps=1) for bits in (2, 6, 8)]
FORMS = [affine(8, 64, 64, each=1, kv_heads=3, warps=4), affine(4, 32, 64, each=12), affine(4, 64, 256, each=3), affine(2, 32, 64), affine(8, 32, 64), affine(8, 64, 512, each=2, warps=1)]
MASKED = [affine(4, 64, 128, masked=True)]
HALVES = [affine(8, 64, 128, queries=mx.bfloat16, scales=mx.bfloat16), affine(4, 64, 64, queries=mx.float16, scales=mx.float16)]
TURBO = [turbo(8, bits, 128) for bits in (2, 3, 4, 5, 8)] + [turbo(bits, 3, 64, each=1) for bits in (2, 4, 5)]
TURBO += [turbo(8, 3, 256, each=5, warps=1), turbo(8, 3, 512, each=1, warps=1), turbo(8, 3, 64, kv_heads=1, masked=True), turbo(8, 3, 128, each=2, queries=mx.bfloat16)]
SPREAD = affine(8, 64, 128, scale=0.015)
# Where keys and values lie in records; widths at multiples of 16, 8 and 4 bytes.
RECORDS = [replace(shape, records=True) for shape in [*WIDTHS, *GROUPS[:3], FORMS[2], FORMS[-1], *MASKED, *HALVES, *TURBO[:2], *TURBO[4:6], *TURBO[8:]]]
# The same in blocks: fewer tokens than a warp takes at a time, as many, and more.
LISTED = [(WIDTHS[2], 16), (WIDTHS[2], 5), (GROUPS[0], 1), (HALVES[0], 64), (TURBO[1], 16), (TURBO[1], 1), (TURBO[8], 64), (FORMS[-1], 16)]
LISTED = [replace(shape, records=True, block=block) for shape, block in LISTED]

Library = plain.Library | metal.Library


@pytest.fixture(scope="module", params=[plain, metal], ids=["plain", "metal"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return request.param.Library([*WIDTHS, *GROUPS, *FORMS, *MASKED, *HALVES, *TURBO, SPREAD], tmp_path_factory.mktemp("dialect"))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> plain.Library:
    return plain.Library([*RECORDS, *LISTED], tmp_path_factory.mktemp("records"))


def made(shape: Shape, rows: int, capacity: int, seed: int = 0) -> tuple:
    mx.random.seed(seed)
    q = mx.random.normal((rows, shape.kv_heads * shape.each, 1, shape.dim)).astype(shape.queries)
    k, v = ((mx.random.normal((rows, shape.kv_heads, capacity, shape.dim)) * 2 + 0.3).astype(shape.scales) for _ in range(2))
    return q, *check.sides(k, v, shape.layout, capacity)


def expected(shape: Shape, q: mx.array, keys: tuple, values: tuple, slots: int, mask: np.ndarray | None = None) -> np.ndarray:
    held = [tuple(part[:, :, :slots] for part in side) for side in (keys, values)]
    k, v = (np.repeat(np.array(side).astype(np.float64), shape.each, axis=1) for side in check.dequantized(*held, shape.layout))
    scores = np.array(q.astype(mx.float32)).astype(np.float64) * shape.scale @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("shape", [*WIDTHS, *GROUPS, *FORMS], ids=str)
def test_every_format_equals_attention_over_dequantized_values(library: Library, shape: Shape) -> None:
    q, keys, values = made(shape, rows=2, capacity=160)
    for slots, splits in ((131, 3), (16, 1), (33, 2)):
        got = library.decode(shape, q, keys, values, slots, None, splits)
        assert np.abs(got - expected(shape, q, keys, values, slots)).max() < 1e-5


@pytest.mark.parametrize("shape", TURBO, ids=str)
def test_turboquant_equals_attention_over_its_own_decoded_values(library: Library, shape: Shape) -> None:
    """Gate 2 of the format: a thousandth in fp32, a hundredth in 16 bits."""
    q, keys, values = made(shape, rows=2, capacity=160)
    mask = np.arange(131) >= np.array([0, 40]).reshape(2, 1, 1, 1) if shape.masked else None
    got, want = library.decode(shape, q, keys, values, 131, mask, 3), expected(shape, q, keys, values, 131, mask)
    assert np.linalg.norm(got - want) <= np.linalg.norm(want) * (1e-2 if shape.queries == mx.bfloat16 else 5e-4)


@pytest.mark.parametrize("shape", RECORDS, ids=str)
def test_records_are_read_as_planes_are(records: plain.Library, library: Library, shape: Shape) -> None:
    q, keys, values = made(shape, rows=2, capacity=160)
    mask = np.arange(131) >= np.array([0, 40]).reshape(2, 1, 1, 1) if shape.masked else None
    for slots, splits in ((131, 3), (16, 1)):
        held = None if mask is None else mask[..., :slots]
        got = records.decode(shape, q, keys, values, slots, held, splits)
        # The merging sums in another order on Metal.
        assert np.allclose(got, library.decode(replace(shape, records=False), q, keys, values, slots, held, splits), rtol=1e-2 if shape.queries == mx.bfloat16 else 2e-3, atol=1e-5)


@pytest.mark.parametrize("shape", LISTED, ids=str)
def test_blocks_of_records_are_read_by_their_table(records: plain.Library, shape: Shape) -> None:
    """Rows of any lengths, among blocks and behind a row's last token nothing but NaN."""
    for lengths, splits in (((0, 1, 16, 131), 3), ((15, 160, 33), 1)):
        q, keys, values = made(shape, rows=len(lengths), capacity=160, seed=splits)
        held, table = check.scattered(shape.form.record.join(list(zip(keys, values, strict=True))), lengths, shape.block)
        got = records.decode_listed(shape, q, held, table, blocks.on_device(lengths), splits)
        for row, n in enumerate(lengths):
            mine = [tuple(part[row : row + 1] for part in side) for side in (keys, values)]
            want = expected(shape, q[row : row + 1], *mine, n)[0] if n else 0
            assert np.linalg.norm(got[row] - want) <= np.linalg.norm(want) * (1e-2 if shape.queries == mx.bfloat16 else 5e-4)


@pytest.mark.parametrize("shape", LISTED, ids=str)
def test_a_right_kernel_over_blocks_passes_its_self_test_and_a_wrong_one_does_not(records: plain.Library, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    for others in (0, 1, -1):

        def decode(q: mx.array, held: mx.array, record: Record, table: mx.array, lengths: mx.array, *rest: Any, others: int = others) -> mx.array:
            tuning = rest[-1]
            return mx.array(records.decode_listed(shape, q, held, table, mx.maximum(lengths + others, 1), tuning.splits))

        monkeypatch.setattr(check, "decode_listed", decode)
        assert check.passes(shape.form) == (others == 0)


@pytest.mark.parametrize("shape", [shape for shape in RECORDS if shape.kv_heads == 2], ids=str)
def test_a_right_kernel_passes_its_self_test(records: plain.Library, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    def decode(queries: mx.array, held: mx.array, record: Record, slots: int, scale: float, mask: mx.array | None, tuning: Tuning) -> mx.array:
        keys, values = zip(*record.split(held), strict=True)
        return mx.array(records.decode(shape, queries, keys, values, slots, None if mask is None else np.array(mask), tuning.splits))

    monkeypatch.setattr(check, "decode_records", decode)
    assert check.passes(shape.form)


@pytest.mark.parametrize("shape", HALVES, ids=str)
def test_sixteen_bit_queries_and_scales(library: Library, shape: Shape) -> None:
    q, keys, values = made(shape, rows=1, capacity=96)
    got, want = library.decode(shape, q, keys, values, 77, None, 2), expected(shape, q, keys, values, 77)
    # Half a unit in the last place of the output's type, and what comes of queries having 16 bits of their head's largest.
    assert np.all(np.abs(got - want) <= np.abs(want) * (2.0**-8 if shape.queries == mx.bfloat16 else 2.0**-11) + 1e-4)


def test_rows_with_left_padding(library: Library) -> None:
    (shape,) = MASKED
    q, keys, values = made(shape, rows=3, capacity=128)
    mask = np.arange(90) >= np.array([0, 17, 64]).reshape(3, 1, 1, 1)
    got = library.decode(shape, q, keys, values, 90, mask, 4)
    assert np.abs(got - expected(shape, q, keys, values, 90, mask)).max() < 1e-5
    for row, hidden in enumerate((0, 17, 64)):
        alone = [tuple(np.array(part)[row : row + 1, :, hidden:90] for part in side) for side in (keys, values)]
        solo = library.decode(WIDTHS[2], q[row : row + 1], *(tuple(map(mx.array, side)) for side in alone), 90 - hidden, None, 4)
        assert np.abs(got[row] - solo[0]).max() < 1e-5


@pytest.mark.parametrize("spread", [1e-3, 1e3])
def test_scales_of_any_size_lose_nothing(library: Library, spread: float) -> None:
    """Weights go into the second product as halves: tokens whose values are much larger or smaller than others' must not overflow or vanish."""
    shape = SPREAD
    q, keys, values = made(shape, rows=1, capacity=70)
    factor = mx.where(mx.arange(70) % 3 == 0, spread, 1.0).reshape(1, 1, 70, 1)
    values = (values[0], values[1] * factor, values[2] * factor)
    want = expected(replace(shape, scale=0.3), q, keys, values, 70)
    got = library.decode(shape, q * 20, keys, values, 70, None, 3)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
