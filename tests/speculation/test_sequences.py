"""Generations outside a batch (`generate_step`): the tokens of plain decoding, and caches that hold what was handed out, wherever the caller stops."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import build
from mlx_lm.models.cache import make_prompt_cache
from speculative_runs import Known, plain, speculation

from mlx_lm_tiered import caches as kinds


def prompt_of(count: int, seed: int = 1) -> list[int]:
    mx.random.seed(seed)
    return mx.random.randint(3, 1000, (count,)).tolist()


def generated(model, prompt: list[int], count: int, caches=None, close_at: int | None = None, **options):
    """Tokens, as far as `close_at`, and the caches."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model) if caches is None else caches
    tokens = []
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=64, **options)
    for token, logprobs in steps:
        assert logprobs.ndim == 1
        tokens.append(token)
        if len(tokens) == close_at:
            steps.close()
    return tokens, caches


@pytest.mark.parametrize("family", ["sliding", "hybrid", "chunked", "compressed"])
def test_tokens_are_plain_decodings_and_the_caller_may_stop_anywhere(family: str):
    """Also of those that have no batch. The next turn goes on from where the caller stopped."""
    model, _ = build(family)
    prompt, more = prompt_of(45), prompt_of(3, seed=2)
    places = (1, 3) if family == "compressed" else range(1, 6)  # the first is slow
    with plain():
        expected, whole = generated(model, prompt, 24)
        turns = [generated(model, prompt + expected[:count] + more, 4)[0] for count in places]
    with speculation(1, lambda: Known(prompt, expected)) as run:
        for run.tokens in (2, 4):
            got, caches = generated(model, prompt, 24)
            assert got == expected and kinds.length(caches) == kinds.length(whole)
        counted = run.report()
        stopped = [generated(model, prompt, 24, close_at=count) for count in places]
    assert 0 < counted["accepted"] < counted["drafted"]
    with plain():
        for count, (tokens, caches), turn in zip(places, stopped, turns, strict=True):
            assert tokens == expected[:count]
            assert kinds.length(caches) in (len(prompt) + count, None)
            assert generated(model, more, 4, caches)[0] == turn, count


@pytest.mark.parametrize("processed", [False, True])
def test_the_same_seed_samples_the_same_tokens(processed: bool):
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    model, _ = build("sliding")
    prompt = prompt_of(45)
    seen: list[list[int]] = []

    def note(context, logits):
        seen.append(context.tolist())
        return logits

    def answer(seed: int) -> list[int]:
        mx.random.seed(seed)
        seen.clear()
        processors = [note, *make_logits_processors(repetition_penalty=1.2)] if processed else None
        return generated(model, prompt, 30, sampler=make_sampler(temp=0.7, min_p=0.05), logits_processors=processors)[0]

    with plain():
        other, expected = answer(8), answer(7)
        contexts = list(seen)
    with speculation(4, lambda: Known(prompt, expected)) as run:
        got = answer(7)
        assert run.report()["acceptance"] > 0.2
    assert got == expected != other
    assert seen == contexts


def test_where_caches_are_converted_between_tokens_it_stays_away():
    model, _ = build("dense64")
    prompt = prompt_of(45)
    for settings, options in (({"kv_scheme": "affine:8@60"}, {}), ({}, {"kv_bits": 8, "quantized_kv_start": 0})):
        with plain(**settings):
            expected, _ = generated(model, prompt, 24, **options)
        with speculation(4, lambda expected=expected: Known(prompt, expected), **settings) as run:
            assert generated(model, prompt, 24, **options)[0] == expected
            assert run.report()["requests"] == 0


def test_an_endless_generation_goes_on():
    model, _ = build("dense")
    prompt = prompt_of(45)
    with plain():
        expected, _ = generated(model, prompt, -1, close_at=40)
    with speculation(4, lambda: Known(prompt, expected)) as run:
        assert generated(model, prompt, -1, close_at=38)[0] == expected[:38]
        assert run.report()["accepted"] > 0


def test_a_ring_that_keeps_its_first_tokens_is_left_alone():
    """Of ``--max-kv-size``: past it mlx-lm's mask hides the kept tokens from all but a chunk's first."""
    model, _ = build("moe")
    prompt = prompt_of(45)
    with plain():
        expected, _ = generated(model, prompt, 24, make_prompt_cache(model, 24))
    with speculation(4, lambda: Known(prompt, expected)) as run:
        assert generated(model, prompt, 24, make_prompt_cache(model, 24))[0] == expected
        assert run.report()["requests"] == 0
