"""The encoding kernel in the dialects that run here, against the codec byte for byte; and what serves, once its self-test has passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import metal
import mlx.core as mx
import numpy as np
import plain
import pytest

from mlx_lm_tiered.kernels import choice, encode, source
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.kernels.encode import INPUTS, OUTPUTS, Form
from mlx_lm_tiered.schemes.turbo import TurboQuant, TurboQuantKVCache
from mlx_lm_tiered.statistics import Statistics
from mlx_lm_tiered.turboquant import codec

FORMS = [Form(8, bits, 64, 2, mx.float32) for bits in (2, 3, 4, 5, 8)] + [Form(bits, 3, 128, 1, mx.float32) for bits in (2, 4, 5)]
FORMS += [Form(8, 3, 256, 1, mx.bfloat16), Form(4, 4, 512, 1, mx.float16)]
WIDTHS = {"keys": "T", "values": "T", "bounds": "float", "signs": "float", "root": "float", "kpacked": "u32", "kscales": "half", "vpacked": "u32", "vscales": "half"}


def sizes(form: Form) -> list[int]:
    groups = form.dim // 32
    return [groups * form.key_bits, 2 * groups, groups * form.value_bits, groups]


def outputs(form: Form, shape: Sequence[int]) -> list[np.ndarray]:
    return [np.zeros((*shape[:3], width), kind) for width, kind in zip(sizes(form), (np.uint32, np.float16) * 2, strict=True)]


class Plain:
    """As `metal.Library`, for encoding."""

    def __init__(self, forms: list[Form], directory: Path):
        self._forms = forms
        out = ['#include "plain.inc"\n', source.text("common.inc"), "}\nusing namespace decode_attention;\n"]
        out.append("static const void* in[5]; static void* out[4]; static const long* strides[2];\n")
        for number, form in enumerate(forms):
            out.append(f"static void body_{number}() {{\nusing T = {plain.TYPES[form.dtype]};\n{plain.constants(encode.constants(form))}")
            out += [f"const auto* {name} = (const {WIDTHS[name]}*)in[{i}];\n" for i, name in enumerate(INPUTS)]
            out += [f"auto* {name} = ({WIDTHS[name]}*)out[{i}];\n" for i, name in enumerate(OUTPUTS)]
            out.append(f"const long *keys_strides = strides[0], *values_strides = strides[1];\n{source.text('encode.body')}}}\n")
        bodies = ", ".join(f"body_{number}" for number in range(len(forms)))
        out.append(f'extern "C" bool run(int which, const void** i, void** o, const long** s, const int* grid, int threads) {{\nstatic void (*bodies[])() = {{{bodies}}};\n')
        out.append("for (int n = 0; n < 5; ++n) in[n] = i[n];\nfor (int n = 0; n < 4; ++n) out[n] = o[n];\nstrides[0] = s[0]; strides[1] = s[1];\nreturn fibers::run_grid(bodies[which], grid, threads);\n}\n")
        self._run = plain.compiled("".join(out), directory).run

    def __call__(self, form: Form, keys: mx.array, values: mx.array) -> list[np.ndarray]:
        rows, heads, tokens, dim = keys.shape
        arrays = [plain._view(a) for a in (keys, values, *encode._constants(form.value_bits, dim))]
        made = outputs(form, keys.shape)
        strides = [(ctypes.c_long * 4)(*(s // a.itemsize for s in a.strides)) for a in arrays[:2]]
        assert self._run(
            self._forms.index(form), (ctypes.c_void_p * 5)(*(a.ctypes.data for a in arrays)), (ctypes.c_void_p * 4)(*(a.ctypes.data for a in made)),
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
            shapes = [(1, form.heads, 4, width) for width in sizes(form)]
            options = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": shapes, "output_dtypes": [mx.uint32, mx.float16] * 2}
            inputs = [keys, keys, *encode._constants(form.value_bits, form.dim)]
            self._kernels.append(metal.written(encode.kernel("metal", form), options, inputs, source.header("metal")))
        self._library = metal.linked(self._kernels, directory)

    def __call__(self, form: Form, keys: mx.array, values: mx.array) -> list[np.ndarray]:
        rows, heads, tokens, dim = keys.shape
        made = outputs(form, keys.shape)
        arrays = dict(zip((*INPUTS, *OUTPUTS), [*map(metal._view, (keys, values, *encode._constants(form.value_bits, dim))), *made], strict=True))
        which = self._forms.index(form)
        metal.call(self._library, self._kernels[which], which, arrays, {}, (tokens, rows * heads, 1), dim)
        return made


@pytest.fixture(scope="module", params=[Plain, Metal], ids=["plain", "metal"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain | Metal:
    return request.param(FORMS, tmp_path_factory.mktemp("encode"))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bytes_are_the_codecs(library: Plain | Metal, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "encode", lambda form, keys, values: [mx.array(a) for a in library(form, keys, values)])
    assert encode.right(form)
    # Of a model's very strides, and to the last bit.
    mx.random.seed(4)
    keys, values = (mx.random.normal((2, 5, form.heads, form.dim)).astype(form.dtype).swapaxes(1, 2) for _ in range(2))
    found = library(form, keys, values)
    for got, want in zip(found, [*codec.encode_keys(keys, form.key_bits), *codec.encode_values(values, form.value_bits)], strict=True):
        assert np.array_equal(got, np.array(want))


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[1]

    def codecs(form: Form, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [*codec.encode_keys(keys, form.key_bits), *codec.encode_values(values, form.value_bits)]

    results = []
    for place, times in ((None, 1), (0, 2), (1, 1.01), (2, 2), (3, 1.01)):
        monkeypatch.setattr(encode, "encode", lambda form, k, v, place=place, times=times: [a if n != place else (a * times).astype(a.dtype) for n, a in enumerate(codecs(form, k, v))])
        results.append(encode.right(form))
    assert results == [True, False, False, False, False]


def test_it_serves_caches_once_it_passed_and_never_else(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = (mx.random.normal((1, 2, 3, 64), key=mx.random.key(seed)) for seed in range(2))
    served: list[Any] = []

    def codecs(form: Form, keys: mx.array, values: mx.array) -> list[mx.array]:
        served.append(form)
        return [*codec.encode_keys(keys, form.key_bits), *codec.encode_values(values, form.value_bits)]

    monkeypatch.setattr(choice, "available", lambda: True)
    monkeypatch.setattr(encode, "encode", codecs)
    kernels = Kernels()
    monkeypatch.setattr(TurboQuant, "encoder", kernels.encode)
    plainly = [*codec.encode_keys(keys, 8), *codec.encode_values(values, 3)]
    fetched = TurboQuantKVCache().update_and_fetch(keys, values)
    assert all(mx.array_equal(a, b) for a, b in zip([part for side in fetched for part in side], plainly, strict=True))
    # Once by the self-test, once in its place.
    assert served == [Form(8, 3, 64, 2, mx.float32)] * 2
    monkeypatch.setattr(encode, "right", lambda form: False)
    statistics = Statistics()
    broken = Kernels("auto", lambda text: statistics.fault("decode_kernel", text))
    for _ in range(2):
        assert broken.encode(keys, values, 8, 3) is None
    assert broken.failed == 1 and statistics.report()["faults"] == {"decode_kernel": 1} and len(served) == 2
    assert Kernels("off").encode(keys, values, 8, 3) is None
