"""Caches that hand their buffers out whole, as they do where kernels read them: everything else sees what it saw."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import build
from mlx_lm.models import cache
from scheme_families import WIDE, wide
from scheme_runs import alone, batch, prompt, scheme

from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.plugin import current
from mlx_lm_tiered.schemes import attention
from mlx_lm_tiered.schemes.held import Held
from mlx_lm_tiered.schemes.lockstep import Single


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "caches_use", lambda kernels: setattr(Single, "lean", True))
    yield
    attention_off()


def attention_off() -> None:
    Single.lean = False


@pytest.mark.parametrize(("name", "text"), [("dense64", "affine:8:32"), ("dense64", "turbo"), ("kv-shared64", "turbo:k8v4@47"), ("kv-donors", "affine:8:32"), ("sliding64", "affine:4:32"), ("sliding64", "turbo@60")])
def test_tokens_are_the_same(name: str, text: str, lean: None) -> None:
    """Over the border at which buffers grow, from one request and from rows of a batch."""
    requests = [(0, prompt(230, 1), 40), (3, prompt(60, 2), 12)]
    with scheme(text):
        model = wide(name) if name in WIDE else build(name)[0]
        assert Single.lean
        ours = [alone(model, tokens, count, step=48) for _, tokens, count in requests], batch(model, requests)
        assert current().report()["faults"] == {}  # the scheme is on
        Single.lean = False
        assert ours == ([alone(model, tokens, count, step=48) for _, tokens, count in requests], batch(model, requests))


@pytest.mark.parametrize("text", ["affine:4:32", "turbo"])
def test_what_is_cut_out_is_what_the_cache_holds(text: str, lean: None) -> None:
    with scheme(text):
        model, _ = build("dense64")
        caches = cache.make_prompt_cache(model)
        alone(model, prompt(40), 3, caches=caches)
        one = caches[0]
        lent = copy.copy(one)
        before = [np.array(part) for side in lent.keys_and_values() for part in side]
        heads, dim, dtype = one.shapes()[0]
        keys, values = one.update_and_fetch(*(mx.random.normal((1, heads, 2, dim)).astype(dtype) for _ in range(2)))
        assert isinstance(keys, Held) and keys.slots == one.offset == lent.offset + 2 and len(keys) == len(one.parts)
        whole = [part for side in one.keys_and_values() for part in side]
        assert all(mx.array_equal(a, b) for a, b in zip([*keys, *values], whole, strict=True)) and mx.array_equal(keys[0], whole[0])
        # What shares its buffers is as it was.
        assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, [part for side in lent.keys_and_values() for part in side], strict=True))


def test_it_is_so_only_where_kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = Kernels("off")
    for state, expected in (("on", True), ("none for this device", False), ("off", False)):
        kernels.state = state
        attention.caches_use(kernels)
        assert Single.lean == expected
    attention_off()
