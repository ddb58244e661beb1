"""Drafts for requests whose KV is in blocks: the tokens of plain decoding, no block more than was promised, none held afterwards, and no arena copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache
from speculative_runs import Ended, Known, collect, generate, generator, plain, speculation
from test_assistants import Traced
from test_draft_models import drafting, prompt_of

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.paged import attention, plan
from mlx_lm_tiered.paged.admission import longest
from mlx_lm_tiered.paged.plan import Plan
from mlx_lm_tiered.paged.scheme import Pages, storage_of
from mlx_lm_tiered.paged.table import Storage
from mlx_lm_tiered.speculation.assistant.source import AssistantSource
from mlx_lm_tiered.statistics import Statistics
from support.models import ASSISTANT, TINY

COUNT = 24


@pytest.fixture(autouse=True)
def paged_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", attention.build(base.quantized_scaled_dot_product_attention))


@contextmanager
def promised(model: Any, made: Plan, prompt: int, block: int, apart: bool = False) -> Iterator[tuple[Storage, list[Any]]]:
    """Caches over a pool of which every free block is promised to them; `apart`: no two of those are neighbours. Nothing may be held at the end."""
    blocks = -(-longest(prompt, COUNT) // block)
    storage = made.storage(2 * blocks if apart else blocks, block)
    everything = storage.pool.take(storage.pool.total) if apart else []
    others = everything[1::2]
    storage.pool.let_go(everything[::2])
    caches = made.apply(make_prompt_cache(model), storage)
    found = storage_of(caches)
    assert found is not None and storage.pool.available == blocks
    found[1].reserve(blocks)
    del found
    yield storage, caches
    caches.clear()
    assert (storage.pool.used, storage.pool.reserved) == (len(others), 0)


def answer(model: Any, prompt: list[int], caches: list[Any]) -> Ended:
    """Generate in a batch, which is handed the caches as a server does: nobody else has them then."""
    made = generator(model)
    try:
        made.insert([list(prompt)], max_tokens=[COUNT], caches=[caches[:]])
        caches.clear()
        return collect(made)
    finally:
        made.close()


def addresses(storage: Storage) -> list[int]:
    """Where the arenas are: a write that found a second handle has put them elsewhere."""
    return [np.array(arena, copy=False).__array_interface__["data"][0] for planes in storage.arenas.planes for arena in planes]


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma4_text"])
def test_a_request_alone_takes_the_blocks_that_it_was_promised_whatever_becomes_of_its_drafts(family: str):
    """Models with recurrent state, whose right drafts are forwarded again, and with layers that read another's keys and values, among them."""
    model, tokenizer = load(str(TINY[family]))
    prompt = prompt_of(tokenizer, 70)
    made = plan.make(model, make_prompt_cache(model))
    assert made is not None
    with plain():
        expected = generate(model, prompt, COUNT).tokens
    with speculation(1, lambda: Known(prompt, expected)) as run:
        for run.tokens, block, apart in ((2, 1, False), (5, 1, True), (5, 16, True), (7, 16, False), (5, 256, False)):
            with promised(model, made, len(prompt), block, apart) as (storage, caches):
                ended = answer(model, prompt, caches)
                assert ended.tokens == expected and kinds.length(ended.last.prompt_cache) == len(prompt) + COUNT
                del ended
            assert storage.pool.peak <= storage.pool.total
        counted, faults = run.report(), run.faults()
    assert faults == {} and 0 < counted["accepted"] < counted["drafted"] and (counted["replays"] > 0) == (family == "lfm2")


@pytest.mark.parametrize("block", [1, 16])
def test_a_draft_model_outside_a_batch_and_wherever_the_caller_stops(block: int):
    model, tokenizer = load(str(TINY["llama"]))
    prompt = prompt_of(tokenizer, 45)
    made = plan.make(model, make_prompt_cache(model))
    assert made is not None

    def sequence(caches: list[Any], stop: int) -> list[int]:
        from mlx_lm.generate import generate_step  # the plugin's, once it is on

        tokens = []
        steps = generate_step(mx.array(prompt), model, max_tokens=COUNT, prompt_cache=caches, prefill_step_size=64)
        for token, _ in steps:
            tokens.append(int(token))
            if len(tokens) == stop:
                steps.close()
        return tokens

    with plain():
        expected = sequence(make_prompt_cache(model), COUNT)
    with drafting(TINY["llama"], 4) as run:
        for stop in (1, 3, 4, 6, COUNT):
            with promised(model, made, len(prompt), block, apart=True) as (_, caches):
                assert sequence(caches, stop) == expected[:stop] and kinds.length(caches) == len(prompt) + stop
        assert run.report()["acceptance"] > 0.9


def test_rows_that_come_and_go_while_one_drafts():
    """Each decodes by itself with drafts, in a batch without; a row's drafts never take what another was promised."""
    model, tokenizer = load(str(TINY["llama"]))
    prompts, counts = (prompt_of(tokenizer, 60), prompt_of(tokenizer, 33, start=700)), (60, 8)
    made = plan.make(model, make_prompt_cache(model))
    assert made is not None
    with plain():
        expected = [generate(model, prompt, count).tokens for prompt, count in zip(prompts, counts, strict=True)]
    blocks = [-(-longest(len(prompt), count) // 4) for prompt, count in zip(prompts, counts, strict=True)]
    storage = made.storage(sum(blocks), 4)
    rows = [made.apply(make_prompt_cache(model), storage) for _ in prompts]
    for row, needed in zip(rows, blocks, strict=True):
        storage_of(row)[1].reserve(needed)  # type: ignore[index]
    del row
    with drafting(TINY["llama"], 3) as run:
        batch = generator(model)
        found: dict[int, list[int]] = {}
        uids: list[int] = []
        for step in range(200):
            if step in (0, 5):
                place = len(uids)
                uids += batch.insert([list(prompts[place])], max_tokens=[counts[place]], caches=[rows.pop(0)])
            for response in batch.next()[1]:
                found.setdefault(response.uid, []).append(response.token)
            if [len(found.get(uid, ())) for uid in uids] == list(counts):
                break
        batch.close()
        counted = run.report()
    assert [found[uid] for uid in uids] == expected and counted["target_calls"] > 5
    del batch, response
    assert storage.pool.used == storage.pool.reserved == 0


@pytest.mark.parametrize("apart", [False, True])
def test_an_assistant_reads_keys_and_values_out_of_the_blocks_and_keeps_none(apart: bool):
    """Its drafts are those it makes over plain caches; the next forward writes in place."""
    model, tokenizer = load(str(TINY["gemma4_text"]))
    source = AssistantSource(ASSISTANT)
    assert source.refuses(model) == ""
    made = plan.make(model, make_prompt_cache(model))
    assert made is not None
    for length in (40, 300):
        prompt, runs = prompt_of(tokenizer, length), []
        traced: list[Traced] = []

        def drafter(traced: list[Traced] = traced) -> Traced:
            traced.append(Traced(source.begin(model)))
            return traced[-1]

        with speculation(3, drafter) as run:
            runs.append(generate(model, prompt, COUNT).tokens)
            with promised(model, made, length, 16, apart) as (storage, caches):
                for layer in range(len(made.paged)):
                    storage.arenas.settle(layer)
                before = addresses(storage)
                runs.append(answer(model, prompt, caches).tokens)
                assert addresses(storage) == before, "an arena was copied"
            assert run.faults() == {}
        plainly, paged = traced
        assert runs[0] == runs[1] and plainly.drafts == paged.drafts and plainly.accepted == paged.accepted and sum(paged.accepted) > 5


def test_a_model_that_drafts_finds_what_it_computed_as_one_that_answers_and_the_other_way_round():
    """Of the same files both have their entries under one name."""
    model, tokenizer = load(str(TINY["llama"]))
    prompt, path = prompt_of(tokenizer, 50), TINY["llama"]
    pages = Pages(16, 4 << 20, Statistics())
    paged = pages._known(model, path, make_prompt_cache(model))[0].apply(make_prompt_cache(model), pages.storages[path])  # type: ignore[index]
    mx.eval(model(mx.array([prompt]), cache=paged))
    pool = pages.storages[path].pool
    used = pool.used
    copied = pages.unpaged(kinds.lend(paged, 40))
    assert {type(cache) for cache in copied} == {KVCache} and kinds.length(copied) == 40 and pool.used == used
    back = pages.adopted(path, kinds.lend(copied))
    assert pool.used == used + 3 and pages.adopted(path, back) is back and kinds.length(copied) == 40
    rest = mx.array([prompt[40:]])
    whole = make_prompt_cache(model)
    model(mx.array([prompt]), cache=whole)
    plainly = kinds.lend(whole, 40)
    expected = model(rest, cache=plainly)
    assert mx.array_equal(model(rest, cache=copied), expected) and mx.array_equal(model(rest, cache=back), expected)
    # mlx-lm's own caches of a model and a draft model: the draft model's stay what they are.
    both = pages.adopted(path, [*plainly, *kinds.lend(plainly)])
    assert both is not None and [storage_of([cache]) is not None for cache in both] == [True] * len(plainly) + [False] * len(plainly)
    del paged, back, both
    assert pool.used == 0
    object.__delattr__(model, "_mlx_lm_tiered_pages")
