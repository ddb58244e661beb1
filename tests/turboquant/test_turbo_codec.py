"""The TurboQuant codec: bytes, distortion, and groups that have no range."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
import turbo_numpy as other

from mlx_lm_tiered.turboquant import codebooks, codec, derive
from mlx_lm_tiered.turboquant.packing import pack, unpack

DIMS = (64, 128, 256, 512)
FORMS = [*itertools.product(("keys",), (2, 4, 5, 8), DIMS), *itertools.product(("values",), (2, 3, 4, 5, 8), DIMS)]


def as_bytes(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint8))


def book(bits: int) -> np.ndarray:
    return np.array(codebooks.code_book(bits), np.float32)


def signs(dim: int) -> np.ndarray:
    return np.array(codebooks.signs(dim), np.float32)


def samples(dim: int) -> np.ndarray:
    """Gaussian rows, rows of a large mean, rows with outliers, tiny and huge ones, and rows with constant groups."""
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(2, 3, 60, dim)).astype(np.float32)
    x[0, 0] += 100
    x[0, 1] *= 1e-6
    x[0, 2] *= 3e5
    x[1, 0, :, ::7] *= 50
    x[1, 1, :20] = 0
    x[1, 1, 20:40] = rng.normal(size=(20, 1))
    x[1, 1, 40:, :32] = -2.5
    return x


@pytest.mark.parametrize(("side", "bits", "dim"), FORMS)
def test_bytes_are_those_of_an_independent_implementation(side, bits, dim):
    x = samples(dim)
    encoded = getattr(codec, f"encode_{side}")(mx.array(x), bits)
    if side == "keys":
        packed, s, z = other.keys(x, bits)
        scales = np.concatenate([s, z], axis=-1)
        back = other.keys_back(packed, s, z, bits)
        decoded = codec.decode_keys(encoded, bits)
    else:
        packed, scales = other.values(x, bits, book(bits), signs(dim))
        back = other.values_back(packed, scales, bits, book(bits), signs(dim))
        decoded = codec.decode_values(encoded, bits)
    assert np.array_equal(as_bytes(encoded.packed), packed)
    assert np.array_equal(np.array(encoded.scales).view(np.uint16), scales.view(np.uint16))
    assert np.array_equal(np.array(decoded), back)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_mlxs_own(bits):
    x = mx.random.normal((3, 5, 128), key=mx.random.key(bits))
    packed = mx.quantize(x, group_size=32, bits=bits)[0]
    index = unpack(packed, bits)
    assert mx.array_equal(pack(index.astype(mx.uint32), bits), packed)
    assert np.array_equal(as_bytes(packed), other.stream(np.array(index), bits))


def relative(decoded: mx.array, x: mx.array) -> float:
    return (((decoded - x) ** 2).mean() / (x**2).mean()).item()


@pytest.mark.parametrize(("bits", "low", "high"), [(2, 0.110, 0.1135), (3, 0.0315, 0.0335), (4, 0.0086, 0.0092), (5, 0.0022, 0.0026), (8, 3.6e-5, 4.2e-5)])
def test_distortion_of_values(bits, low, high):
    x = mx.random.normal((20000, 128), key=mx.random.key(5))
    assert low < relative(codec.decode_values(codec.encode_values(x, bits), bits), x) < high


@pytest.mark.parametrize(("bits", "low", "high"), [(2, 0.155, 0.175), (4, 0.0063, 0.0068), (5, 0.00148, 0.00157), (8, 2.2e-5, 2.4e-5)])
def test_distortion_of_keys(bits, low, high):
    """As even steps have it: a group of 32 normal numbers is 4.14 deviations wide, and the error a twelfth of a step's square."""
    x = mx.random.normal((20000, 128), key=mx.random.key(5))
    found = relative(codec.decode_keys(codec.encode_keys(x, bits), bits), x)
    affine = mx.dequantize(*mx.quantize(x, group_size=32, bits=bits), group_size=32, bits=bits)
    # mlx moves its steps so that zero is one of them, which is worth something where steps are few.
    assert low < found < high and found < (1.3 if bits == 2 else 1.02) * relative(affine, x)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_keys_of_models_types(dtype):
    x = mx.random.normal((2000, 128), key=mx.random.key(6)).astype(dtype)
    affine = mx.dequantize(*mx.quantize(x.astype(mx.float32), group_size=32, bits=8), group_size=32, bits=8)
    mine = relative(codec.decode_keys(codec.encode_keys(x, 8), 8), x.astype(mx.float32))
    assert mine < 1.1 * relative(affine, x.astype(mx.float32))


@pytest.mark.parametrize("bits", codebooks.KEY_BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 0.1, 1e-5, 1e-7, -2e-9, 40000.0, -1e6, 65504.0])
def test_a_constant_group_of_keys_is_exact(bits, value):
    """The reference divides by zero here."""
    x = mx.full((2, 64), value)
    decoded = codec.decode_keys(codec.encode_keys(x, bits), bits)
    if abs(value) <= 65504 and float(np.float16(value)) == float(np.float32(value)):
        assert mx.array_equal(decoded, x)
    elif abs(value) < 1e-4:
        assert mx.abs(decoded - x).max() < 2**-24, "less than fp16's smallest number"
    else:
        # fp32's last bits; beyond fp16, what the zero point has to add is large.
        assert mx.abs(decoded / x - 1).max() < (2e-7 if abs(value) <= 65504 and bits > 2 else 1e-4)


@pytest.mark.parametrize("bits", codebooks.VALUE_BITS)
def test_a_zero_vector_of_values_is_exact(bits):
    for tiny in (0.0, 1e-30):
        assert mx.array_equal(codec.decode_values(codec.encode_values(mx.full((3, 128), tiny), bits), bits), mx.zeros((3, 128)))


@pytest.mark.parametrize("bits", codebooks.KEY_BITS)
@pytest.mark.parametrize("sigmas", [10, 100, 1000, 100000])
def test_a_large_mean_costs_little_of_the_detail(bits, sigmas):
    """The reference's mean squared error grows 40-fold at 100 sigmas: its zero points are rounded, and so is what is computed from them."""
    x = mx.random.normal((2000, 64), key=mx.random.key(8))
    near, far = ((codec.decode_keys(codec.encode_keys(x + m, bits), bits) - (x + m)).square().mean().item() for m in (0, sigmas))
    # fp16 numbers so far out are this far apart.
    apart = 2.0 ** (np.floor(np.log2(sigmas)) - 10)
    assert far < max(2 * near, apart**2)


def test_a_few_channels_with_huge_biases():
    """Qwen2.5's keys."""
    x = mx.random.normal((4000, 128), key=mx.random.key(9))
    bias = mx.zeros(128)
    bias[mx.array([5, 40, 77])] = mx.array([180.0, -90.0, 60.0])
    queries = mx.random.normal((32, 128), key=mx.random.key(10))
    decoded = codec.decode_keys(codec.encode_keys(x + bias, 8), 8)
    # In a group with an outlier a step is the outlier's; others keep theirs.
    error = mx.abs(decoded - (x + bias)).reshape(-1, 4, 32).max(axis=(0, 2))
    assert error[3] < 0.03 and error.max() < 0.6 * 190 / 254
    scores = (queries @ (decoded - x - bias).T) / 128**0.5
    assert scores.square().mean().sqrt() < 0.2


@pytest.mark.parametrize("dim", [0, 32, 48, 96, 192, 1024])
@pytest.mark.parametrize("call", ["encode_keys", "encode_values", "rotate", "unrotate"])
def test_other_head_dimensions_are_refused_before_mlx_is_asked(dim, call, monkeypatch):
    monkeypatch.setattr(mx, "hadamard_transform", lambda *a, **k: pytest.fail("mlx was asked"))
    with pytest.raises(ValueError, match=f"heads of {dim} have no TurboQuant form"):
        getattr(codec, call)(mx.zeros((2, dim)), *([4] if "encode" in call else []))


def test_attention_over_the_packed_keys_themselves():
    x, q = (mx.random.normal((2, 50, 128), key=mx.random.key(seed)) for seed in (1, 2))
    for bits in codebooks.KEY_BITS:
        encoded = codec.encode_keys(x + 3, bits)
        scale, zero = codec.key_scales(encoded)
        scores = mx.quantized_matmul(q, encoded.packed, scale, codec.key_biases(scale, zero, bits), group_size=32, bits=bits)
        expected = q @ codec.decode_keys(encoded, bits).swapaxes(-1, -2)
        assert mx.abs(scores - expected).max() < 1e-3


ORACLES = {2: (0.117482, [0.452780, 1.510418]), 3: (0.034548, [0.245094, 0.756005, 1.343909, 2.151946]), 4: (0.009501, None), 5: (0.002505, None), 8: (4.12e-5, None)}


@pytest.mark.parametrize("bits", codebooks.VALUE_BITS)
def test_the_code_books_are_what_their_derivation_gives(bits):
    derived = derive.code_book(bits)
    assert np.array_equal(np.array(codebooks.CENTROIDS[bits], np.float32), derived.astype(np.float32))
    error, centroids = ORACLES[bits]
    assert derive.distortion(derived) == pytest.approx(error, rel=1e-3)
    assert centroids is None or np.abs(derived - centroids).max() < 1e-6


@pytest.mark.parametrize("dim", DIMS)
def test_the_signs_are_mlxs_bits_under_key_42(dim):
    drawn = mx.random.randint(0, 2, (dim,), key=mx.random.key(42)) * 2 - 1
    assert codebooks.signs(dim) == drawn.tolist()
