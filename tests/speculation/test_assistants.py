"""Gemma 4 assistants at work: drafts and acceptance as mlx-optiq has them, the tokens of plain decoding, whatever the caches are like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten
from pairs import V, cases, target, write_assistant
from speculative_runs import generate, generator, plain, speculation

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.speculation.assistant.source import AssistantSource
from mlx_lm_tiered.speculation.source import Draft
from support.models import ASSISTANT, TINY, document

GOLDEN = Path(__file__).parent / "golden" / "optiq_spec.json"


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, V, length).tolist()


def sequence(model: Any, prompt: list[int], count: int, caches: list[Any]) -> list[int]:
    """Tokens of a generation outside a batch."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches, prefill_step_size=64)]


class Traced:
    """A drafter that notes its drafts, and how many of each were right."""

    def __init__(self, drafter: Any):
        self._drafter = drafter
        self.drafts: list[list[int]] = []
        self.accepted: list[int] = []
        self.hopes, self.end = drafter.hopes, drafter.end

    def draft(self, *arguments: Any) -> Draft:
        draft = self._drafter.draft(*arguments)
        if draft.tokens:
            self.drafts.append(draft.tokens)
        return draft

    def verified(self, drafted: int, accepted: int) -> None:
        self.accepted.append(accepted)
        self._drafter.verified(drafted, accepted)


@pytest.mark.parametrize(("name", "head", "kind"), [*cases()])
def test_drafts_acceptance_and_tokens_are_those_of_the_golden_file(name: str, head: str, kind: str, tmp_path: Path):
    model = target(name)
    source = AssistantSource(write_assistant(tmp_path, name, head, kind, model), "advance", 15)
    assert source.refuses(model) == ""
    runs = [run for run in json.loads(GOLDEN.read_text()) if (run["target"], run["head"], run["kind"]) == (name, head, kind)]
    assert len(runs) == 6
    for length in (5, 40):
        prompt, count = prompt_of(length), 40
        with plain():
            expected = generate(model, prompt, count + 5).tokens
        made: list[Traced] = []

        def drafter() -> Traced:
            made.append(Traced(source.begin(model)))
            return made[-1]

        with speculation(1, drafter) as speculating:
            for run in [run for run in runs if run["plen"] == length]:
                assert (run["prompt"], run["tokens"]) == (prompt, expected[:count])
                speculating.tokens = run["gamma"]
                # As many more tokens that the last round has room for all its drafts.
                assert generate(model, prompt, count + run["gamma"] + 1).tokens == expected[: count + run["gamma"] + 1]
                traced = made.pop()
                rounds = [[draft[3] for draft in one] for one in run["rounds"]]
                assert traced.drafts[: len(rounds)] == rounds
                # The file's last round ends where its answer does.
                assert traced.accepted[: len(rounds) - 1] == run["trace"][: len(rounds) - 1]


def echo(tmp_path: Path, name: str = "e4b", **options: Any) -> tuple[Any, AssistantSource]:
    """A target and an assistant that is right fairly often."""
    model = target(name)
    source = AssistantSource(write_assistant(tmp_path / "assistant", name, "tied", "echo", model), **options)
    assert source.refuses(model) == ""
    return model, source


@pytest.mark.parametrize("scheme", ["affine:8:32", "affine:4:32@50", "turbo:k8v4"])
def test_quantized_keys_and_values_are_borrowed_as_they_are(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mlx_lm.models import base
    from mlx_lm_tiered.speculation.assistant.model import DecoderLayer

    prompt = prompt_of(40)
    model, source = echo(tmp_path, "wide")
    layers = type(model.layers[0]), DecoderLayer  # of one module, or of two if another test had it imported anew

    def answer() -> list[int]:
        # A model's module has the attention that there was when it was imported; a server imports it with the plugin on.
        for layer in layers:
            monkeypatch.setitem(layer.__call__.__globals__, "scaled_dot_product_attention", base.scaled_dot_product_attention)
        return generate(model, prompt, 30).tokens

    with plain(kv_scheme=scheme):
        expected = answer()
    with speculation(2, lambda: source.begin(model), kv_scheme=scheme) as run:
        assert answer() == expected
        counted, faults = run.report(), run.faults()
    assert faults == {} and counted["accepted"] >= 3


@pytest.mark.parametrize("options", [{}, {"position": "advance"}, {"position": "before", "window": 7}], ids=str)
def test_outside_a_batch_and_the_next_turn(options: dict[str, Any], tmp_path: Path):
    """Past the window, from caches that hold a turn already."""
    from mlx_lm.models.cache import make_prompt_cache

    prompt, more = prompt_of(40), prompt_of(9)
    model, source = echo(tmp_path, "u12b", **options)

    def turns() -> tuple[list[int], list[int], list[Any]]:
        caches = make_prompt_cache(model)
        first = sequence(model, prompt, 21, caches)
        return first, sequence(model, more, 20, caches), caches

    with plain():
        first, second, caches = turns()
    with speculation(3, lambda: source.begin(model)) as run:
        got = turns()
        counted = run.report()
    assert got[:2] == (first, second) and kinds.length(got[2]) == kinds.length(caches) == 40 + 21 + 9 + 20
    assert counted["accepted"] >= 5 and counted["requests"] == 2


def test_a_request_that_was_among_others_drafts_again_when_it_is_alone(tmp_path: Path):
    """Among others the model's last hidden states are of several rows; the first step alone is a plain one."""
    model, source = echo(tmp_path, "u12b")
    prompts, counts = (prompt_of(40), prompt_of(23)), (50, 8)
    with plain():
        expected = [generate(model, prompt, count).tokens for prompt, count in zip(prompts, counts, strict=True)]
    with speculation(2, lambda: source.begin(model)) as run:
        made = generator(model)
        got: dict[int, list[int]] = {}
        uids = made.insert([list(prompts[0])], max_tokens=[counts[0]])
        for now in range(200):
            if now == 6:
                alone = run.report()["target_calls"]
                uids += made.insert([list(prompts[1])], max_tokens=[counts[1]])
            responses = made.next()[1]
            for response in responses:
                got.setdefault(response.uid, []).append(response.token)
            if len(got) == 2 and all(len(got[uid]) == count for uid, count in zip(uids, counts, strict=True)):
                break
        made.close()
        counted, faults = run.report(), run.faults()
    assert [got[uid] for uid in uids] == expected and faults == {}
    assert counted["target_calls"] > alone > 0 and counted["accepted"] >= 3


def test_a_trained_pair_is_right_often_and_changes_no_token():
    """Prompts within the window, past it, and of several chunks."""
    from mlx_lm import load

    model, tokenizer = load(str(TINY["gemma4_text"]))
    source = AssistantSource(ASSISTANT)
    assert source.refuses(model) == "" and source.tokens == 2
    text = tokenizer.encode(document(3000))
    prompts = [text[:length] for length in (5, 40, 600)]
    with plain():
        expected = [generate(model, prompt, 40).tokens for prompt in prompts]
    with speculation(1, lambda: source.begin(model)) as run:
        for run.tokens in (1, 2, 4):
            assert [generate(model, prompt, 40).tokens for prompt in prompts] == expected
        counted, faults = run.report(), run.faults()
    assert faults == {} and counted["acceptance_by_position"][0] > 0.6 and counted["mean_accepted"] > 1
    with speculation(2, lambda: source.begin(model), spec_strict=True) as run:
        assert generate(model, prompts[1], 40).tokens == expected[1]
        strict = run.report()
    assert run.faults() == {} and strict["acceptance_by_position"][0] > 0.6 and strict["target_calls"] > strict["accepted"] > 0


def test_it_computes_in_the_models_type(tmp_path: Path):
    import mlx.core as mx

    model, source = echo(tmp_path, "u12b")
    model.set_dtype(mx.bfloat16)
    assert source.refuses(model) == ""
    with speculation(2, lambda: source.begin(model)) as run:
        generate(model, prompt_of(40), 12)
        assert run.faults() == {} and run.report()["drafted"] > 0
    assert source._assistant is not None
    assert {array.dtype for _, array in tree_flatten(source._assistant.parameters())} == {mx.bfloat16}


def test_a_model_that_it_does_not_fit_is_refused_by_name(tmp_path: Path):
    from families import build

    _, source = echo(tmp_path)
    assert "Gemma 4" in source.refuses(build("dense")[0])
    assert "KV heads" in source.refuses(target("u12b"))
