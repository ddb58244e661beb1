"""The encoding kernel in the dialects that run here, against the codec byte for byte; and what serves, once its self-test has passed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import metal
import mlx.core as mx
import numpy as np
import plain
import pytest

from mlx_lm_tiered.kernels import choice, encode, source
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.kernels.encode import OUTPUTS, ROUNDINGS, Form, Rounding
from mlx_lm_tiered.kernels.layout import Layout
from mlx_lm_tiered.kernels.records import record_of
from mlx_lm_tiered.schemes.caches import QuantizedKVCache
from mlx_lm_tiered.schemes.lockstep import Lockstep
from mlx_lm_tiered.schemes.turbo import TurboQuantKVCache
from mlx_lm_tiered.statistics import Statistics


def turbo(key_bits: int, value_bits: int, dim: int, heads: int, dtype: mx.Dtype) -> Form:
    return Form(record_of(Layout.turboquant(key_bits, value_bits), dim, dim, mx.float16), heads, dtype)


def affine(bits: int, group_size: int, dim: int, heads: int, dtype: mx.Dtype) -> Form:
    return Form(record_of(Layout.affine(bits, group_size), dim, dim, dtype), heads, dtype)


def named(form: Form) -> str:
    return f"{form.record.layout}-{form.dim}-{form.dtype}"


FORMS = [turbo(8, bits, 64, 2, mx.float32) for bits in (2, 3, 4, 5, 8)] + [turbo(bits, 3, 128, 1, mx.float32) for bits in (2, 4, 5)]
FORMS += [turbo(8, 3, 256, 1, mx.bfloat16), turbo(4, 4, 512, 1, mx.float16)]
AFFINE = [affine(bits, 64, 128, 2, mx.float32) for bits in (2, 3, 4, 5, 6, 8)] + [affine(4, 32, 96, 1, mx.bfloat16), affine(8, 128, 128, 1, mx.float16), affine(5, 32, 64, 3, mx.bfloat16)]
WIDTHS = {"bounds": "float", "signs": "float", "root": "float"}


class Plain:
    """As `metal.Library`, for encoding."""

    def __init__(self, forms: list[Form], directory: Path, rounding: Rounding = ROUNDINGS[0]):
        self._forms = forms
        out = ['#include "plain.inc"\n', source.text("common.inc"), "}\nusing namespace decode_attention;\n"]
        out.append("static const void* in[5]; static u32* made; static const long* strides[2];\n")
        for number, form in enumerate(forms):
            out.append(f"static void body_{number}() {{\nusing T = {plain.TYPES[form.dtype]};\n{plain.constants(encode.constants(form, rounding))}")
            out += [f"const auto* {name} = (const {WIDTHS.get(name, 'T')}*)in[{i}];\n" for i, name in enumerate(encode.inputs(form))]
            out.append(f"const long *keys_strides = strides[0], *values_strides = strides[1];\n{source.text(encode.text(form))}}}\n")
        bodies = ", ".join(f"body_{number}" for number in range(len(forms)))
        out.append(f'extern "C" bool run(int which, const void** i, u32* o, const long** s, const int* grid, int threads) {{\nstatic void (*bodies[])() = {{{bodies}}};\n')
        out.append("for (int n = 0; n < 5; ++n) in[n] = i[n];\nmade = o; strides[0] = s[0]; strides[1] = s[1];\nreturn fibers::run_grid(bodies[which], grid, threads);\n}\n")
        self._run = plain.compiled("".join(out), directory).run

    def __call__(self, form: Form, keys: mx.array, values: mx.array) -> np.ndarray:
        rows, heads, tokens, dim = keys.shape
        arrays = [plain._view(a) for a in (keys, values, *encode.constants_of(form))]
        made = np.zeros((rows, heads, tokens, form.record.words), np.uint32)
        strides = [(ctypes.c_long * 4)(*(s // a.itemsize for s in a.strides)) for a in arrays[:2]]
        assert self._run(
            self._forms.index(form), (ctypes.c_void_p * 5)(*(a.ctypes.data for a in arrays)), ctypes.c_void_p(made.ctypes.data),
            (ctypes.POINTER(ctypes.c_long) * 2)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_long)) for s in strides)),
            (ctypes.c_int * 3)(tokens, rows * heads, 1), dim,
        )  # fmt: skip
        return made


class Metal:
    """The text that mlx makes of it for Metal, compiled by clang."""

    def __init__(self, forms: list[Form], directory: Path):
        self._forms = forms
        self._kernels = []
        for form in forms:
            keys = mx.zeros((1, form.heads, 4, form.dim), form.dtype)
            options = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1, form.heads, 4, form.record.words)], "output_dtypes": [mx.uint32]}
            self._kernels.append(metal.written(encode.kernel("metal", form), options, [keys, keys, *encode.constants_of(form)], source.header("metal")))
        self._library = metal.linked(self._kernels, directory)

    def __call__(self, form: Form, keys: mx.array, values: mx.array) -> np.ndarray:
        rows, heads, tokens, dim = keys.shape
        made = np.zeros((rows, heads, tokens, form.record.words), np.uint32)
        arrays = dict(zip((*encode.inputs(form), *OUTPUTS), [*map(metal._view, (keys, values, *encode.constants_of(form))), made], strict=True))
        which = self._forms.index(form)
        metal.call(self._library, self._kernels[which], which, arrays, {}, (tokens, rows * heads, 1), dim)
        return made


def serve(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """Have `made` (form, rounding, keys, values) stand for the kernel."""

    class Encoder:
        def __init__(self, form: Form, rounding: Rounding = ROUNDINGS[0]):
            self.given = form, rounding

        def __call__(self, keys: mx.array, values: mx.array) -> mx.array:
            return made(*self.given, keys, values)

    monkeypatch.setattr(encode, "Encoder", Encoder)


@pytest.fixture(scope="module", params=[Plain, Metal], ids=["plain", "metal"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain | Metal:
    return request.param(FORMS, tmp_path_factory.mktemp("encode"))


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_bytes_are_the_codecs(library: Plain | Metal, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, lambda form, rounding, keys, values: mx.array(library(form, keys, values)))
    assert encode.right(form)
    check(library, form)


def check(library: Any, form: Form) -> None:
    """Of a model's very strides, and to the last bit."""
    mx.random.seed(4)
    keys, values = (mx.random.normal((2, 5, form.heads, form.dim)).astype(form.dtype).swapaxes(1, 2) for _ in range(2))
    assert np.array_equal(library(form, keys, values), np.array(form.record.join(encode.planes(form, keys, values))))


@pytest.fixture(scope="module")
def roundings(tmp_path_factory: pytest.TempPathFactory) -> dict[Rounding, Plain]:
    return {rounding: Plain(AFFINE, tmp_path_factory.mktemp("quantize"), rounding) for rounding in ROUNDINGS}


@pytest.mark.parametrize("form", AFFINE, ids=named)
def test_affine_bytes_are_mlxs(roundings: dict[Rounding, Plain], form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, lambda form, rounding, keys, values: mx.array(roundings[rounding](form, keys, values)))
    # mlx quantizes otherwise on a processor than on a GPU, and the self-test finds out how.
    assert encode.right(form) == ROUNDINGS[1]
    check(roundings[ROUNDINGS[1]], form)
    # Groups that are all below 0 begin at 0 there.
    keys = -1 - mx.random.uniform(shape=(1, form.heads, 3, form.dim), key=mx.random.key(3)).astype(form.dtype)
    numbers = [form.record.split(mx.array(library(form, keys, keys)))[2][0] for library in roundings.values()]
    wide, exact = (np.array(biases.astype(mx.float32)) for biases in numbers)
    assert np.array_equal(exact, np.array(encode.planes(form, keys, keys)[2][0].astype(mx.float32))) and np.array_equal(wide, exact)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for form, places in ((FORMS[1], 2), (AFFINE[2], 3)):
        results = []
        for place, side, times in [(None, 0, 1)] + [(place, side, 1.01 if place else 2) for place in range(places) for side in range(2)]:

            def made(form: Form, rounding: Rounding, keys: mx.array, values: mx.array, place: Any = place, side: int = side, times: float = times) -> mx.array:
                planes = [list(sides) for sides in encode.planes(form, keys, values)]
                if place is not None:
                    planes[place][side] = (planes[place][side] * times).astype(planes[place][side].dtype)
                return form.record.join(planes)

            serve(monkeypatch, made)
            results.append(encode.right(form) is not None)
        assert results == [True] + [False] * 2 * places


@pytest.mark.parametrize(("form", "made"), [(turbo(8, 3, 64, 2, mx.float32), TurboQuantKVCache), (affine(4, 32, 64, 2, mx.float32), lambda: QuantizedKVCache(bits=4, group_size=32))], ids=["turbo", "affine"])
@pytest.mark.parametrize("records", [False, True])
def test_it_serves_caches_once_it_passed_and_never_else(monkeypatch: pytest.MonkeyPatch, form: Form, made: Any, records: bool) -> None:
    keys, values = (mx.random.normal((1, 2, 3, 64), key=mx.random.key(seed)) for seed in range(2))
    served: list[Any] = []

    def kernel(form: Form, rounding: Rounding, keys: mx.array, values: mx.array) -> mx.array:
        served.append(form)
        return form.record.join(encode.planes(form, keys, values))

    monkeypatch.setattr(choice, "available", lambda: True)
    serve(monkeypatch, kernel)
    kernels = Kernels()
    monkeypatch.setattr(Lockstep, "encoder", kernels.encode)
    monkeypatch.setattr(Lockstep, "keeps_records", records)
    fetched = made().update_and_fetch(keys, values)
    plainly = [plane for side in zip(*encode.planes(form, keys, values), strict=True) for plane in side]
    assert all(mx.array_equal(a, b) for a, b in zip([part for side in fetched for part in side], plainly, strict=True))
    # Once by the self-test, once in its place.
    assert served == [form] * 2
    monkeypatch.setattr(encode, "right", lambda form: None)
    statistics = Statistics()
    broken = Kernels("auto", lambda text: statistics.fault("decode_kernel", text))
    for _ in range(2):
        assert broken.encode(keys, values, form.record) is None
    assert broken.failed == 1 and statistics.report()["faults"] == {"decode_kernel": 1} and len(served) == 2
    assert Kernels("off").encode(keys, values, form.record) is None
