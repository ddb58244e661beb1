"""The decode kernel in the dialects that run here, plain C++ and imitated Metal, against attention over dequantized keys and values in fp64."""

from __future__ import annotations

import metal
import mlx.core as mx
import numpy as np
import plain
import pytest
from plain import Shape

WIDTHS = [Shape(bits, 64, 128) for bits in (2, 3, 4, 5, 6, 8)]
GROUPS = [Shape(bits, 32, 96, each=2) for bits in (3, 4, 5)] + [Shape(bits, 128, 128, each=8, warps=1) for bits in (2, 6, 8)]
FORMS = [Shape(8, 64, 64, each=1, kv_heads=3, warps=4), Shape(4, 32, 64, each=12), Shape(4, 64, 256, each=3), Shape(2, 32, 64), Shape(8, 32, 64)]
MASKED = [Shape(4, 64, 128, masked=True)]
HALVES = [Shape(8, 64, 128, queries=mx.bfloat16, scales=mx.bfloat16), Shape(4, 64, 64, queries=mx.float16, scales=mx.float16)]


Library = plain.Library | metal.Library


@pytest.fixture(scope="module", params=[plain, metal], ids=["plain", "metal"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return request.param.Library([*WIDTHS, *GROUPS, *FORMS, *MASKED, *HALVES], tmp_path_factory.mktemp("dialect"))


def made(shape: Shape, rows: int, capacity: int, seed: int = 0) -> tuple:
    mx.random.seed(seed)
    q = mx.random.normal((rows, shape.kv_heads * shape.each, 1, shape.dim)).astype(shape.queries)
    k, v = ((mx.random.normal((rows, shape.kv_heads, capacity, shape.dim)) * 2 + 0.3).astype(shape.scales) for _ in range(2))
    return q, *(mx.quantize(side, group_size=shape.group_size, bits=shape.bits) for side in (k, v))


def expected(shape: Shape, q: mx.array, keys: tuple, values: tuple, slots: int, scale: float, mask: np.ndarray | None = None) -> np.ndarray:
    def whole(side: tuple) -> np.ndarray:
        parts = (side[0], *(part.astype(mx.float32) for part in side[1:]))
        return np.array(mx.dequantize(*parts, group_size=shape.group_size, bits=shape.bits))[:, :, :slots].astype(np.float64)

    k, v = (np.repeat(whole(side), shape.each, axis=1) for side in (keys, values))
    scores = np.array(q.astype(mx.float32)).astype(np.float64) * scale @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("shape", [*WIDTHS, *GROUPS, *FORMS], ids=str)
def test_every_format_equals_attention_over_dequantized_values(library: Library, shape: Shape) -> None:
    q, keys, values = made(shape, rows=2, capacity=160)
    for slots, splits in ((131, 3), (1, 1)):
        got = library.decode(shape, q, keys, values, slots, 0.11, None, splits)
        assert np.abs(got - expected(shape, q, keys, values, slots, 0.11)).max() < 1e-5


@pytest.mark.parametrize("shape", HALVES, ids=str)
def test_sixteen_bit_queries_and_scales(library: Library, shape: Shape) -> None:
    q, keys, values = made(shape, rows=1, capacity=96)
    got, want = library.decode(shape, q, keys, values, 77, 0.11, None, 2), expected(shape, q, keys, values, 77, 0.11)
    # Half a unit in the last place of the output's type.
    assert np.all(np.abs(got - want) <= np.abs(want) * (2.0**-8 if shape.queries == mx.bfloat16 else 2.0**-11) + 1e-5)


def test_rows_with_left_padding(library: Library) -> None:
    (shape,) = MASKED
    q, keys, values = made(shape, rows=3, capacity=128)
    mask = np.arange(90) >= np.array([0, 17, 64]).reshape(3, 1, 1, 1)
    got = library.decode(shape, q, keys, values, 90, 0.11, mask, 4)
    assert np.abs(got - expected(shape, q, keys, values, 90, 0.11, mask)).max() < 1e-5
    for row, hidden in enumerate((0, 17, 64)):
        alone = [tuple(np.array(part)[row : row + 1, :, hidden:90] for part in side) for side in (keys, values)]
        solo = library.decode(WIDTHS[2], q[row : row + 1], *(tuple(map(mx.array, side)) for side in alone), 90 - hidden, 0.11, None, 4)
        assert np.abs(got[row] - solo[0]).max() < 1e-5


@pytest.mark.parametrize("spread", [1e-3, 1e3])
def test_scales_of_any_size_lose_nothing(library: Library, spread: float) -> None:
    """Weights go into the second product as halves: tokens whose values are much larger or smaller than others' must not overflow or vanish."""
    shape = WIDTHS[5]
    q, keys, values = made(shape, rows=1, capacity=70)
    factor = mx.where(mx.arange(70) % 3 == 0, spread, 1.0).reshape(1, 1, 70, 1)
    values = (values[0], values[1] * factor, values[2] * factor)
    want = expected(shape, q, keys, values, 70, 0.3)
    got = library.decode(shape, q * 20, keys, values, 70, 0.015, None, 3)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
