"""Prefixes in scripts: text unchanged, keys that match their caches, and no cache that belongs to other weights."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest
from mlx_lm import generate, load, stream_generate
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

PROMPT = "The os module provides functions that interact with the operating system, and the sys module"


@pytest.fixture
def plain(llama):
    """The text without a plugin."""
    return generate(*llama, PROMPT, max_tokens=8)


def test_text_is_the_same_and_the_second_run_starts_from_the_first(plain, llama, witness):
    assert generate(*llama, PROMPT, max_tokens=8) == plain
    assert generate(*llama, PROMPT, max_tokens=8) == plain
    first, second = witness.named("take")
    assert first["length"] == 0 and second["length"] == second["tokens"] - 1
    assert all(e["offsets"] == [e["tokens"]] for e in witness.named("put"))
    boundary = witness.named("snapshot")[0]
    assert boundary["tokens"] == first["tokens"] - 1 and boundary["offsets"] == [boundary["tokens"]]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_generation_that_is_left_early_keeps_what_its_caches_hold(llama, witness, count):
    model, tokenizer = llama
    tokens = tokenizer.encode(PROMPT)
    steps = sys.modules["mlx_lm.generate"].generate_step(mx.array(tokens), model, max_tokens=50)
    for _ in range(count):
        next(steps)
    steps.close()
    (put,) = witness.named("put")
    assert put["offsets"] == [put["tokens"]] == [len(tokens) + count]


def test_a_callers_caches_are_filled_in_place(plain, llama, witness):
    model, tokenizer = llama
    generate(model, tokenizer, PROMPT, max_tokens=8)
    mine = make_prompt_cache(model)
    counts = []
    text = ""
    for r in stream_generate(
        model, tokenizer, PROMPT, max_tokens=8, prompt_cache=mine, prompt_progress_callback=lambda *a: counts.append(a)
    ):
        text += r.text
    assert text == plain
    assert mine[0].offset == len(tokenizer.encode(PROMPT)) + 8
    assert counts == [(0, 1), (1, 1)]
    assert witness.named("take")[-1]["length"] > 0
    # The caller goes on with its own caches: they are not looked up again.
    generate(model, tokenizer, " is", max_tokens=2, prompt_cache=mine)
    assert len(witness.named("take")) == 2


def test_caches_that_the_model_would_not_make_are_left_alone(llama, witness):
    model, tokenizer = llama
    mine = [RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
    generate(model, tokenizer, PROMPT, max_tokens=2, prompt_cache=mine)
    generate(model, tokenizer, PROMPT, max_tokens=2, max_kv_size=16)
    assert witness.named("take") == []


def test_kv_bits_are_a_scheme_of_their_own(llama, witness):
    model, tokenizer = llama
    generate(model, tokenizer, PROMPT, max_tokens=2)
    quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    generate(model, tokenizer, PROMPT, max_tokens=2, **quantized)
    assert [e["length"] for e in witness.named("take")] == [0, 0]
    assert witness.named("model_loaded")[-1]["scheme"] == "affine:8:32@0"


def test_the_source_is_where_the_model_was_loaded_from(tiny_llama, witness):
    model, tokenizer = load(str(tiny_llama))
    generate(model, tokenizer, PROMPT, max_tokens=2)
    assert witness.named("model_loaded")[-1]["path"] == str(tiny_llama.resolve())


def test_changed_weights_and_configurations_are_other_models(tiny_llama, witness):
    model, tokenizer = load(str(tiny_llama))
    generate(model, tokenizer, PROMPT, max_tokens=2)
    head = model.model.norm
    head.weight = head.weight * 2
    generate(model, tokenizer, PROMPT, max_tokens=2)
    changed, _ = load(str(tiny_llama), model_config={"rope_theta": 5000.0})
    generate(changed, tokenizer, PROMPT, max_tokens=2)
    assert [e["length"] for e in witness.named("take")] == [0, 0, 0]
    assert [e["path"] for e in witness.named("put")] == [str(tiny_llama.resolve()), "None", "None"]


def test_a_fault_leaves_the_text_as_it_is(plain, llama, witness):
    generate(*llama, PROMPT, max_tokens=2)
    witness.prefixes[0].fail = True
    assert generate(*llama, PROMPT, max_tokens=8) == plain
