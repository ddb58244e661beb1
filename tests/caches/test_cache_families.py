"""Each structural family of models goes on from lent, cut and restored caches as from its own."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest
from cache_states import bits
from families import FAMILIES, VOCABULARY, build, write_model_dir
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from mlx_lm_tiered import caches as kinds
from support.cache_bytes import through_bytes

PROMPT = np.random.default_rng(7).integers(3, VOCABULARY, 120).tolist()
# Not at the end of a window, chunk or compressed group.
PREFIX = 75
MORE = 16
# Rounding changes logits by 1e-5 between chunkings; the best token leads by more than this.
LEAD = 5e-3


@functools.cache
def model_of(name: str):
    return build(name)[0]


def forward(name: str, caches: list, tokens: list[int]) -> mx.array:
    logits = model_of(name)(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits)
    return logits


def greedy(name: str, caches: list, tokens: list[int]) -> tuple[list[int], list]:
    """Tokens after `tokens`, and the logits they came from."""
    chosen, seen = [], []
    logits = forward(name, caches, tokens)
    for _ in range(MORE):
        chosen.append(mx.argmax(logits).item())
        seen.append(logits)
        logits = forward(name, caches, chosen[-1:])
    return chosen, seen


@functools.cache
def cold(name: str) -> tuple[list[int], list]:
    return greedy(name, make_prompt_cache(model_of(name)), PROMPT)


def prefix(name: str, tokens: list[int]) -> list:
    caches = make_prompt_cache(model_of(name))
    forward(name, caches, tokens)
    return caches


@pytest.mark.parametrize("name", FAMILIES)
def test_no_choice_is_close(name: str):
    chosen, seen = cold(name)
    assert min((top := np.sort(np.array(logits)))[-1] - top[-2] for logits in seen) > LEAD
    assert len(set(chosen)) > 5


@pytest.mark.parametrize("name", FAMILIES)
def test_lent_and_restored_are_as_cold_and_equal_each_other(name: str):
    donor = prefix(name, PROMPT[:PREFIX])
    before = bits(donor)
    chosen, logits = greedy(name, kinds.lend(donor), PROMPT[PREFIX:])
    restored_chosen, restored_logits = greedy(name, through_bytes(donor, room=256), PROMPT[PREFIX:])
    assert bits(donor) == before
    assert chosen == restored_chosen == cold(name)[0]
    assert bits(logits) == bits(restored_logits)
    assert max(mx.abs(a - b).max().item() for a, b in zip(logits, cold(name)[1], strict=True)) < LEAD / 10


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("donor_tokens", [len(PROMPT), 20], ids=["past-the-window", "within-the-window"])
def test_cut_where_it_can_be_is_as_cold(name: str, donor_tokens: int):
    other = [t + 1 for t in PROMPT[donor_tokens - 7 : donor_tokens]]
    shared = donor_tokens - 7
    donor = prefix(name, PROMPT[:shared] + other)
    forward(name, donor, [5])
    recurrent = any(word in s for s in kinds.signatures(donor) for word in ("ssm", "deepseek-v41"))
    wraps = name in ("sliding", "kv-shared") and donor_tokens > 32
    front_gone = name == "chunked" and donor_tokens > 32
    assert kinds.can_cut(donor, shared) == (not (recurrent or wraps or front_gone))
    if not kinds.can_cut(donor, shared):
        with pytest.raises(ValueError):
            kinds.lend(donor, shared)
        return
    before = bits(donor)
    lent, restored = kinds.lend(donor, shared), kinds.lend(through_bytes(donor), shared)
    chosen, logits = greedy(name, lent, PROMPT[shared:])
    restored_chosen, restored_logits = greedy(name, restored, PROMPT[shared:])
    assert bits(donor) == before
    assert chosen == restored_chosen == cold(name)[0]
    assert bits(logits) == bits(restored_logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_row_decodes_as_upstreams_merge(name: str):
    caches = prefix(name, PROMPT)
    rows = kinds.merge_row(kinds.lend(caches))
    assert (rows is None) == any(not hasattr(c, "merge") for c in caches)
    if rows is None:
        return
    chosen, logits = greedy(name, rows, [5])
    expected, expected_logits = greedy(name, [c.merge([c]) for c in caches], [5])
    assert chosen == expected
    assert bits(logits) == bits(expected_logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_directory_holds_the_same_model(name: str, tmp_path):
    loaded, tokenizer = load(str(write_model_dir(name, tmp_path)))
    assert bits(loaded(mx.array([PROMPT]))) == bits(model_of(name)(mx.array([PROMPT])))
    assert tokenizer.encode("some text") and tokenizer.chat_template
