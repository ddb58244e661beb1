"""The memory guard's arithmetic: what caches will take, what the budget is, what an error of mlx means."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from itertools import chain

import mlx.core as mx
import pytest
from families import write_model_dir
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_hooks import Admission, Refused, Row
from mlx_lm_patches.mailbox import Mailbox
from mlx_lm_patches.shortage import without_memory
from mlx_lm_tiered.memory import budget as budgets
from mlx_lm_tiered import plugin
from mlx_lm_tiered.memory.footprint import Footprint, measure
from mlx_lm_tiered.memory.guard import MemoryGuard
from mlx_lm_tiered.prefix.relief import Relief
from mlx_lm_tiered.schemes.convert import leaves
from mlx_lm_tiered.schemes.cost import Layer
from support.models import TINY


@pytest.mark.parametrize("chunk", [32, 512])
def test_the_footprint_is_what_a_prefill_takes(tiny_model, chunk):
    model, _ = load(str(tiny_model))
    measured = measure(model)
    assert measured.weights == sum(size for size in _sizes(model))
    for tokens in (40, 300, 700):
        caches = make_prompt_cache(model)
        for start in range(0, tokens, chunk):
            model(mx.zeros((1, min(chunk, tokens - start)), mx.int32), cache=caches)
            mx.eval([cache.state for cache in caches])
        taken = sum(cache.nbytes for cache in caches)
        assert taken <= measured.nbytes(tokens, chunk) <= taken * 1.6 + 256 * 1024
        assert measure(model, caches=caches).nbytes(2000, chunk) == pytest.approx(measured.nbytes(2000, chunk), rel=0.01)


def _sizes(model):
    from mlx.utils import tree_flatten

    return [array.nbytes for _, array in tree_flatten(model.parameters())]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *itertools.product(["llama", "gemma3_text", "lfm2"], ["affine:4:32", "affine:8:32@100", "config"]),
        ("sliding64", "turbo"), ("dense128", "turbo:k5v3@100"),
    ],
)  # fmt: skip
def test_a_scheme_costs_what_its_plan_says_for_each_type_of_layer(name, scheme, tmp_path):
    from mlx_lm import utils
    from mlx_lm.models import cache

    from mlx_lm_hooks import disable, enable

    if scheme == "config":
        first, second = (1, 3) if name == "lfm2" else (0, 1)
        bits = [{"layer_idx": first, "bits": 2, "group_size": 32}, {"layer_idx": second, "bits": 8, "group_size": 32}]
        (tmp_path / "kv.json").write_text(json.dumps(bits))
        scheme = f"config:{tmp_path / 'kv.json'}"
    found = []
    enable("tiered", kv_scheme=scheme)
    try:
        from mlx_lm.generate import generate_step

        model, _ = utils.load(str(TINY.get(name) or write_model_dir(name, tmp_path / "model")))
        plan_of = plugin._runtime.scheme().plan_of
        for tokens in (60, 300, 700):
            caches = cache.make_prompt_cache(model)
            for _ in generate_step(mx.zeros(tokens - 2, mx.int32), model, max_tokens=3, prefill_step_size=128, prompt_cache=caches):
                pass
            found.append((tokens, caches))
        plan, measured = plan_of(model), measure(model, plan_of=plan_of)
    finally:
        disable()
    for tokens, caches in found:
        held: Counter[str] = Counter()
        for layer, leaf in zip(chain.from_iterable(plan.layers), leaves(caches), strict=True):
            arrays = [array for _, array in tree_flatten(leaf.state) if isinstance(array, mx.array)]
            # Buffers have room for more tokens than they hold.
            held[layer.type] += sum(a.nbytes if layer.type == "recurrent" else a.nbytes * min(tokens, a.shape[2]) // a.shape[2] for a in arrays)
        assert plan.bytes_by_type(tokens) == held and plan.bytes_at(tokens) == held.total()
        taken = sum(leaf.nbytes for leaf in caches)
        # While a chunk is computed, a ring holds it whole.
        chunk = int(sum(128 * layer.price(tokens) for layer in chain.from_iterable(plan.layers) if layer.window))
        assert taken <= measured.nbytes(tokens, 128) <= taken * 1.6 + chunk + 64 * 1024
        assert measured.peak(tokens, 128) >= measured.nbytes(tokens, 128)


def test_a_sequence_is_in_full_precision_until_its_start():
    layer = Layer(per_token=1000.0, quantized=300.0, start=5000)
    two = Footprint(0, (layer, layer, Layer(per_token=100.0, window=64), Layer(constant=7)))
    beside = 256 * 100 + 7  # a ring holds its window and a chunk
    assert two.nbytes(4999, 192) == 2 * 5255 * 1000 + beside and two.nbytes(5000, 192) == 2 * 5256 * 300 + beside
    # At the start one of them is quantized while both are still whole; a long sequence takes more than that in the end.
    assert two.peak(5000, 192) == 5256 * (1000 + 1000 + 300) + beside
    assert two.peak(100_000, 192) == two.nbytes(100_000, 192) and two.peak(6000, 192, held=5000) == two.nbytes(6000, 192)
    # A row of a batch has the slots of the longest one, in its own precision.
    assert two.nbytes(100, 192, 9000) == 2 * 9256 * 1000 + beside
    assert two.decoded([Row(4000, -1), Row(6000, 10)]) == 2 * (256 * 1000 + 10 * 300)
    assert two.per_token == 600 and two.computed_per_token == 2000


@pytest.mark.parametrize(
    ("scheme", "admitted"), [("bf16", False), ("affine:4:32", True), ("affine:4:32@1000", True), ("affine:4:32@390000", False)]
)
def test_admission_bills_what_the_scheme_makes_of_a_prompt(scheme, admitted):
    """614 MB in full precision, 115 MB in 4 bits, with 300 MB to be had; a late start would need both."""
    from mlx_lm import utils

    from mlx_lm_hooks import disable, enable

    enable("tiered", kv_scheme=scheme, prompt_cache_bytes=0)
    try:
        model, _ = utils.load(str(TINY["llama"]))
        runtime = plugin._runtime
        guard = MemoryGuard(300_000_000, Relief(lambda: [], lambda: None), runtime.statistics, runtime._plan_of)
        told = guard.admit(Admission(None, model, None, range(400_000), 0, None, 16, 2048))
    finally:
        disable()
    assert (told is None) == admitted and (admitted or told.status == 400)
    assert guard.report()["kv_bytes_per_token"] == (1536 if scheme == "bf16" else 288)


def test_the_budget_is_the_smaller_of_what_was_asked_and_what_there_is(monkeypatch):
    for limits, chosen, expected in [
        ((100, 200), None, 100), ((100, 200), 70, 70), ((100, 200), 150, 100),
        ((None, 200), None, 160), ((None, 200), 190, 190), ((None, 200), 300, 200),
        ((None, None), None, None), ((None, None), 300, 300), ((100, 200), 0, None),
    ]:  # fmt: skip
        monkeypatch.setattr(budgets, "device_limits", lambda limits=limits: limits)
        assert budgets.budget(chosen)[0] == expected


def test_a_control_groups_limit_counts_as_memory(tmp_path):
    machine = budgets.machine_memory(())
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "small").write_text("4096\n")
    assert machine is not None and budgets.machine_memory((tmp_path / "max", tmp_path / "missing")) == machine
    assert budgets.machine_memory((tmp_path / "max", tmp_path / "small")) == 4096


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 96636764160 bytes which is greater than the maximum allowed buffer size of 77309411328 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc] Unable to allocate 1152921504606846976 bytes.",
    ],
)
def test_what_mlx_raises_without_memory_is_told_to_come_again(text):
    refused = without_memory(RuntimeError(text))
    assert refused is not None and refused.status == 503 and refused.retry_after


def test_other_errors_are_what_they_are():
    assert without_memory(MemoryError()) is not None
    assert without_memory(RuntimeError("broadcast shapes")) is None and without_memory(ValueError("out of memory")) is None


class Context:
    stopped = False

    def stop(self):
        self.stopped = True


class Box(list):
    put = list.append


def test_the_door_holds_the_context_until_the_request_is_admitted():
    box, context = Box(), Context()
    mail = Mailbox(box, door=True)
    mail.put(context)
    assert box == [] and mail.held
    mail.open()
    mail.put((1, 2))
    assert box == [context, (1, 2)] and not context.stopped


def test_a_refusal_comes_in_place_of_the_context():
    box, context, refused = Box(), Context(), Refused(400, "no")
    mail = Mailbox(box, door=True)
    mail.put(context)
    mail.fail(refused)
    mail.put((1, 2))
    assert box == [refused] and context.stopped


def test_whatever_else_is_answered_opens_the_door():
    box, context = Box(), Context()
    mail = Mailbox(box, door=True)
    mail.put(context)
    mail.put((0, 3))
    mail.put(RuntimeError("[malloc] Unable to allocate 5 bytes."))
    assert box[:2] == [context, (0, 3)] and isinstance(box[2], Refused)
