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

from mlx_lm_tiered.caches import kind_of
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.plugin import current
from mlx_lm_tiered.schemes import attention
from mlx_lm_tiered.schemes.held import Held, HeldRecords
from mlx_lm_tiered.schemes.lockstep import Lockstep, Single


@pytest.fixture(params=["planes", "records"])
def lean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As kernels have caches hand out their buffers: on Metal, and on CUDA."""

    def on(kernels: Any) -> None:
        Single.lean, Lockstep.keeps_records = True, request.param == "records"

    monkeypatch.setattr(attention, "caches_use", on)
    yield request.param
    off()


def off() -> None:
    Single.lean = Lockstep.keeps_records = False


@pytest.mark.parametrize(("name", "text"), [("dense64", "affine:8:32"), ("dense64", "turbo"), ("kv-shared64", "turbo:k8v4@47"), ("kv-donors", "affine:8:32"), ("sliding64", "affine:4:32"), ("sliding64", "turbo@60")])
def test_tokens_are_the_same(name: str, text: str, lean: str) -> None:
    """Over the border at which buffers grow, from one request and from rows of a batch."""
    requests = [(0, prompt(230, 1), 40), (3, prompt(60, 2), 12)]
    with scheme(text):
        model = wide(name) if name in WIDE else build(name)[0]
        assert Single.lean
        ours = [alone(model, tokens, count, step=48) for _, tokens, count in requests], batch(model, requests)
        assert current().report()["faults"] == {}  # the scheme is on
        off()
        assert ours == ([alone(model, tokens, count, step=48) for _, tokens, count in requests], batch(model, requests))


@pytest.mark.parametrize("text", ["affine:4:32", "turbo"])
def test_what_is_cut_out_is_what_the_cache_holds(text: str, lean: str) -> None:
    with scheme(text):
        model, _ = build("dense64")
        caches = cache.make_prompt_cache(model)
        alone(model, prompt(40), 3, caches=caches)
        one = caches[0]
        lent = copy.copy(one)
        before = [np.array(part) for side in lent.keys_and_values() for part in side]
        heads, dim, dtype = one.shapes()[0]
        keys, values = one.update_and_fetch(*(mx.random.normal((1, heads, 2, dim)).astype(dtype) for _ in range(2)))
        assert isinstance(keys, Held) and keys.slots == one.offset == lent.offset + 2 and len(keys) == len(one.names) and (one.record is None) == (lean == "planes")
        # A layer that reads another's asks for these: views of records would be taken for planes by a kernel.
        assert lean == "planes" or all(isinstance(side, HeldRecords) for side in one.keys_and_values())
        whole = [part for side in one.keys_and_values() for part in side]
        assert all(mx.array_equal(a, b) for a, b in zip([*keys, *values], whole, strict=True)) and mx.array_equal(keys[0], whole[0])
        # What shares its buffers is as it was.
        assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, [part for side in lent.keys_and_values() for part in side], strict=True))


def test_it_is_so_only_where_kernels_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = Kernels("off")
    for state, cuda, expected in (("on", True, (True, True)), ("on", False, (True, False)), ("none for this device", False, (False, False)), ("off", True, (False, False))):
        kernels.state = state
        monkeypatch.setattr(attention, "on_cuda", lambda cuda=cuda: cuda)
        attention.caches_use(kernels)
        assert (Single.lean, Lockstep.keeps_records) == expected and (Lockstep.encoder is None) != Single.lean
    Lockstep.encoder = None
    off()


@pytest.mark.parametrize("text", ["affine:8:32", "turbo", "turbo@47"])
def test_what_others_see_of_records_is_planes(text: str, lean: str) -> None:
    """Lent, cut, dumped, loaded and copied caches go on as those of planes do, and the records' bytes are those of the arrays."""
    with scheme(text):
        model, _ = build("dense64")
        tokens, after = prompt(100, 5), prompt(9, 6)
        caches = cache.make_prompt_cache(model)
        alone(model, tokens, 2, step=48, caches=caches)
        held = [kind_of(one).dump(one) for one in caches]
        assert sum(one.nbytes for one in caches) == sum(kind_of(one).nbytes(one) for one in caches) and all(one.nbytes for one in caches)
        copies = {
            "lent": [kind_of(one).lend(one) for one in caches], "cut": [kind_of(one).lend(one, 60) for one in caches], "copied": [copy.copy(one) for one in caches],
            "loaded": [kind_of(one).load(dump.fields, {name: tensor.array for name, tensor in dump.tensors.items()}) for one, dump in zip(caches, held, strict=True)],
            "row": [kind_of(row).dump(row) and row.extract(0) for one in caches if (row := kind_of(one).row(kind_of(one).lend(one)))],
        }  # fmt: skip
        ours = {name: alone(model, after, 8, caches=made) for name, made in copies.items()}
        off()
        plain = cache.make_prompt_cache(model)
        alone(model, tokens, 2, step=48, caches=plain)
        for one, dump in zip(plain, held, strict=True):
            fields, tensors = kind_of(one).dump(one)
            assert fields == dump.fields and all(mx.array_equal(tensors[name].array, dump.tensors[name].array) for name in tensors) and set(tensors) == set(dump.tensors)
        cut = [kind_of(one).lend(one, 60) for one in plain]
        theirs = {"cut": alone(model, after, 8, caches=cut), "lent": alone(model, after, 8, caches=plain)}
        assert ours == {name: theirs["cut" if name == "cut" else "lent"] for name in ours}
