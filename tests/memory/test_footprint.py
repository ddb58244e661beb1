"""The memory guard's arithmetic: what caches will take, what the budget is, what an error of mlx means."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_hooks import Refused
from mlx_lm_patches.mailbox import Mailbox
from mlx_lm_patches.shortage import without_memory
from mlx_lm_tiered.memory import budget as budgets
from mlx_lm_tiered.memory.footprint import Footprint, Layer, measure


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


def test_a_quantized_cache_is_plain_until_it_is_converted():
    layer = Footprint(0, (Layer(per_token=1024.0, element=2),))
    plain, quantized = layer.nbytes(10_000, 2048), layer.nbytes(10_000, 512, "affine:4:64@0")
    assert plain == 10_240 * 1024
    assert quantized == int(10_240 * 1024 * (0.25 + 2 / 64) + 512 * 1024)


def test_a_scheme_of_quantized_caches_is_measured_as_it_is_stored(tiny_llama):
    from mlx_lm import utils
    from mlx_lm.models import cache

    from mlx_lm_hooks import disable, enable

    scheme = "affine:4:32@0"
    enable("tiered", kv_scheme=scheme)
    try:
        model, _ = utils.load(str(tiny_llama))
        caches = cache.make_prompt_cache(model)
        for _ in range(4):
            model(mx.zeros((1, 256), mx.int32), cache=caches)
            mx.eval([cache.state for cache in caches])
        taken = sum(cache.nbytes for cache in caches)
        measured = measure(model).nbytes(1023, 256, scheme)
    finally:
        disable()
    assert taken < 1024 * 1536 / 3
    assert taken <= measured <= taken * 1.05


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
