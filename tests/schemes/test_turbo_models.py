"""Models under the TurboQuant scheme: which layers get it, and that every way to the same tokens gives the same."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import build
from mlx_lm.models import cache
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache
from scheme_runs import alone, batch, prompt, scheme

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.schemes import plan
from mlx_lm_tiered.schemes.spec import Turbo
from mlx_lm_tiered.schemes.turbo import TurboQuantKVCache

REQUESTS = [(0, prompt(17, 1), 36), (2, prompt(90, 2), 12), (5, prompt(33, 3), 20), (24, prompt(110, 4), 6)]


@pytest.mark.parametrize(("name", "text"), [("dense64", "turbo"), ("dense64", "turbo:k4v3@47"), ("dense256", "turbo@47"), ("sliding64", "turbo@60"), ("kv-shared64", "turbo:k8v4@47")])
def test_rows_equal_their_solo_runs(name, text):
    with scheme(text):
        model, _ = build(name)
        together = batch(model, REQUESTS)
        for (_, tokens, count), row in zip(REQUESTS, together, strict=True):
            assert row == batch(model, [(0, tokens, count)])[0]
            assert row == alone(model, tokens, count, step=48), "one at a time, in other chunks"


@pytest.mark.parametrize(("name", "text", "stays"), [("sliding64", "turbo", RotatingKVCache), ("sliding64", "turbo@20", RotatingKVCache), ("chunked64", "turbo", ChunkedKVCache)])
def test_only_full_attention_converts_and_a_warning_says_so_once(caplog, name, text, stays):
    with scheme(text):
        model, _ = build(name)
        for _ in range(2):
            caches = cache.make_prompt_cache(model)
            alone(model, prompt(40), 3, caches=caches)
        assert {type(c) for c in caches} == {stays, TurboQuantKVCache}
    said = [record.getMessage() for record in caplog.records if "full attention" in record.getMessage()]
    left = sum(type(c) is stays for c in caches)
    assert len(said) == 1 and f"{left} caches of this model are not of full attention and stay as they are" in said[0]


def test_the_bytes_of_a_token():
    """Gate 5: 200 for a KV head of 128 at k8v3, where bf16 takes 512."""
    sizes = {}
    for text in ("bf16", "turbo", "turbo:k8v4", "turbo:k4v3@9"):
        with scheme(text):
            model, _ = build("dense128")
            model.set_dtype(mx.bfloat16)
            caches = cache.make_prompt_cache(model)
            alone(model, prompt(256), 0, step=256, caches=caches)
            sizes[text] = sum(c.nbytes for c in caches) / (3 * 256) / 2
    assert sizes == {"bf16": 512, "turbo": 200, "turbo:k8v4": 216, "turbo:k4v3@9": 136}


@pytest.mark.parametrize(("text", "bytes_of_a_row"), [("turbo", 100), ("turbo:k5v4@20", 84)])
def test_rows_of_a_batch_are_really_converted(text, bytes_of_a_row):
    """And rings beside them are not."""
    with scheme(text):
        from mlx_lm.generate import BatchGenerator

        model, _ = build("sliding64")
        generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4, prefill_step_size=16)
        generator.insert([prompt(n, n) for n in (15, 30, 45)], [8, 8, 8])
        ended = []
        while len(ended) < 3:
            ended += [response.prompt_cache for response in generator.next()[1] if response.finish_reason]
        generator.close()
    for caches in ended:
        assert {type(c) for c in caches} == {RotatingKVCache, TurboQuantKVCache}
        for c in caches:
            arrays = [*c.keys, *c.values] if isinstance(c, TurboQuantKVCache) else [c.keys, c.values]
            each = sum(a.nbytes / a.shape[2] / a.shape[1] for a in arrays)
            # A model in fp32.
            assert each == (bytes_of_a_row if isinstance(c, TurboQuantKVCache) else 2 * 64 * 4)


@pytest.mark.parametrize(("drafter", "of_drafts"), [("dense64", TurboQuantKVCache), ("sliding64", RotatingKVCache), ("dense", KVCache)])
def test_drafts_change_nothing(caplog, drafter, of_drafts):
    """Drafts of the model itself are taken, those of other models are mostly cut again. One with heads of 16 stays in full precision, and a warning says so."""
    with scheme("turbo"):
        from mlx_lm.generate import speculative_generate_step

        model, _ = build("dense64")
        draft, _ = build(drafter)
        expected = alone(model, prompt(40), 24)
        caches = cache.make_prompt_cache(model) + cache.make_prompt_cache(draft)
        steps = list(speculative_generate_step(mx.array(prompt(40)), model, draft, num_draft_tokens=3, max_tokens=24, prompt_cache=caches))
    assert [int(token) for token, _, _ in steps] == expected
    assert (sum(drafted for *_, drafted in steps) > 12) == (drafter == "dense64")
    layers = len(model.layers)
    assert {type(c) for c in caches[:layers]} == {TurboQuantKVCache} and of_drafts in {type(c) for c in caches[layers:]}
    off = [record.getMessage() for record in caplog.records if "is off for" in record.getMessage()]
    assert ["heads of 16 have no TurboQuant form" in text for text in off] == [True] * (drafter == "dense")


@pytest.mark.parametrize("at", [0, 60])
def test_whole_shorter_and_stored_caches_go_on_as_one_that_was_never_interrupted(at):
    """Continuation identity, and nothing of the detail is lost where a prefix is used again after a conversion."""
    tokens = prompt(90)
    with scheme(f"turbo@{at}"):
        model, _ = build("dense64")
        made = cache.make_prompt_cache(model)
        expected = alone(model, tokens, 12, caches=made)
        assert kinds.minimum_reusable(made) == at
        for n in (75, 60, 33, 1):
            assert kinds.can_cut(made, n) == (n >= at)
            if n < at:
                with pytest.raises(ValueError):
                    kinds.lend(made, n)
                continue
            lent = kinds.lend(made, n)
            descriptors, tensors = kinds.dump(lent)
            stored = kinds.load(descriptors, {name: mx.array(tensor.array) for name, tensor in tensors.items()})
            for caches in (lent, stored):
                assert kinds.signatures(caches) == ["kv:turboquant:8:3"] * 3
                assert alone(model, tokens[n:], 12, caches=caches) == expected
        before = cache.make_prompt_cache(model)
        alone(model, tokens[:40], 0, caches=before)
        assert {type(c) for c in before} == {KVCache if at else TurboQuantKVCache}
        # Up to where the prefill is; generate_step leaves the last token to the first step.
        held = before[0].offset
        assert alone(model, tokens[held:], 12, caches=before) == expected


def test_the_start_is_exact_whatever_the_chunks():
    with scheme("turbo:k8v4@60"):
        from mlx_lm.generate import generate_step

        model, _ = build("dense64")
        runs = []
        for step in (7, 48, 60, 2048):
            caches = cache.make_prompt_cache(model)
            [(_, logprobs)] = generate_step(mx.array(prompt(90)), model, max_tokens=1, prefill_step_size=step, prompt_cache=caches)
            assert {type(c) for c in caches} == {TurboQuantKVCache} and {c.minimum_reusable_offset for c in caches} == {60}
            runs.append(logprobs)
        assert all(mx.abs(a - runs[0]).max() < 1e-3 for a in runs)


@pytest.mark.parametrize(("name", "says"), [("dense", "layer 0: heads of 16 have no TurboQuant form"), ("nested", "layer 0")])
def test_a_model_that_cannot_have_it_keeps_full_precision(caplog, monkeypatch, name, says):
    """Nothing is asked of mlx's Hadamard transform for such heads."""
    hadamard, asked = mx.hadamard_transform, []
    monkeypatch.setattr(mx, "hadamard_transform", lambda x, *a, **k: (asked.append(x.shape[-1]), hadamard(x, *a, **k))[1])
    answers = []
    for text in ("bf16", "turbo"):
        with scheme(text):
            model, _ = build(name)
            answers.append((alone(model, prompt(40), 6), batch(model, [(0, prompt(40), 6)])))
    assert answers[0] == answers[1] and asked == []
    [warning] = [record.getMessage() for record in caplog.records if "is off for this model" in record.getMessage()]
    assert says in warning


def test_a_model_without_full_attention_cannot_have_it():
    model, _ = build("dense64")
    with pytest.raises(ValueError, match="none of its layers has full attention"):
        plan.make(model, [RotatingKVCache(32) for _ in model.layers], Turbo(), 0)


def test_the_first_generation_of_a_model_is_converted_as_any_other():
    """Also where `generate_step` makes the caches itself."""
    with scheme("turbo@47"):
        model, _ = build("kv-shared64")
        first, second = (alone(model, prompt(230, 1), 40, step=48) for _ in range(2))
        assert first == second
