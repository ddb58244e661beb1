"""Rows that join a batch and leave it, with the plugin and without: the same tokens, and log-probabilities bit for bit.

The server's batches are upstream's `BatchGenerator`, whose rows the plugin merges and moves in its own way.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from families import FAMILIES, VOCABULARY, build
from mlx_lm.models.cache import make_prompt_cache

import mlx_lm_tiered

ONE_AT_A_TIME = ("chunked", "compressed")
RANDOM = np.random.default_rng(5)
PREFIX = RANDOM.integers(3, VOCABULARY, 90).tolist()  # past every window, chunk and compressed group
PROMPTS = [RANDOM.integers(3, VOCABULARY, n).tolist() for n in (40, 7, 1, 23)]
# (step, prompt, whether it goes on from the prefix, tokens to generate): alone at first, then two, three, four rows.
ARRIVALS = [(0, 0, True, 6), (4, 1, False, 14), (7, 2, True, 9), (7, 3, False, 4), (16, 0, True, 5)]
CANCELLED = (12, 2)  # (step, arrival)


def schedule(model, prefix: list) -> tuple[dict[int, list[int]], dict[int, list[bytes]], int]:
    """Tokens and log-probabilities by arrival, and the most rows that decoded at once."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, prefill_step_size=16)
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[bytes]] = {}
    widest = 0
    for step in range(60):
        for number, (when, prompt, continued, count) in enumerate(ARRIVALS):
            if when == step:
                caches, held = ([copy.deepcopy(prefix)], [list(PREFIX)]) if continued else (None, None)
                assert generator.insert([PROMPTS[prompt]], [count], caches=caches, all_tokens=held) == [number]
        if CANCELLED[0] == step:
            generator.remove([CANCELLED[1]])
        _, responses = generator.next()
        widest = max(widest, len(responses))
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
            logprobs.setdefault(response.uid, []).append(np.array(response.logprobs).tobytes())
    generator.close()
    return tokens, logprobs, widest


@pytest.mark.parametrize("family", ONE_AT_A_TIME)
def test_upstream_has_no_batches_of_the_others(family):
    model, _ = build(family)
    assert not all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ONE_AT_A_TIME])
def test_rows_are_upstreams(family):
    model, _ = build(family)
    prefix = make_prompt_cache(model)
    model(mx.array([PREFIX]), cache=prefix)
    mx.eval([cache.state for cache in prefix])
    tokens, logprobs, widest = schedule(model, prefix)
    assert sorted(tokens) == list(range(len(ARRIVALS))) and widest >= 3
    assert [len(tokens[i]) for i in (0, 1, 3, 4)] == [6, 14, 4, 5] and 0 < len(tokens[CANCELLED[1]]) < 9
    mlx_lm_tiered.enable()
    try:
        assert schedule(model, prefix) == (tokens, logprobs, widest)
    finally:
        mlx_lm_tiered.disable()
