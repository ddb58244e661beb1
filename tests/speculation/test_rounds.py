"""A row alone in its batch gets the tokens of plain decoding, whatever is drafted, and its caches hold exactly its tokens wherever it ends."""

from __future__ import annotations

import mlx.core as mx
import pytest
from families import FAMILIES, build
from mlx_lm.models.cache import KVCache
from speculative_runs import Known, generate, generator, plain, speculation

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.speculation.source import Draft
from support.models import TINY, document

BATCHED = [family for family in FAMILIES if family not in ("chunked", "compressed", "moe")]  # the first two have no batches, the last has the caches of dense


def prompt_of(count: int, seed: int = 1) -> list[int]:
    mx.random.seed(seed)
    return mx.random.randint(3, 1000, (count,)).tolist()


@pytest.mark.parametrize("family", BATCHED)
def test_tokens_are_plain_decodings(family: str):
    """The prompt alone is longer than the window of those that have one."""
    model, _ = build(family)
    prompt = prompt_of(45)
    with plain():
        expected = generate(model, prompt, 40)
    with speculation(1, lambda: Known(prompt, expected.tokens)) as run:
        for run.tokens in (1, 2, 4):
            before = run.report()["accepted"]
            got = generate(model, prompt, 40)
            assert got.tokens == expected.tokens and got.last.finish_reason == "length"
            assert run.report()["accepted"] > before
            _holds_exactly(got.last, prompt + expected.tokens)
            pairs = zip(got.logprobs, expected.logprobs, strict=True)
            assert max(mx.abs(mx.exp(a) - mx.exp(b)).max().item() for a, b in pairs) < 1e-4
        counted = run.report()
    assert counted["accepted"] < counted["drafted"]
    assert (counted["replays"] > 0) == (family in ("hybrid", "recurrent", "parallel-hybrid"))


def _holds_exactly(last, tokens: list[int]) -> None:
    assert last.all_tokens == tokens
    assert kinds.length(last.prompt_cache) in (len(tokens), None)


@pytest.mark.parametrize("name", sorted(TINY))
def test_ngrams_over_text_past_the_window(name: str):
    """The trained models repeat themselves, so that drafts are right and wrong; the rings (64) wrap, and wrap again."""
    from mlx_lm import load

    model, tokenizer = load(str(TINY[name]))
    text = document(160)
    prompt = tokenizer.encode(text + text[:90])
    with plain():
        expected = generate(model, prompt, 72)
    with speculation(1) as run:
        for run.tokens in (1, 4):
            before = run.report()["accepted"]
            got = generate(model, prompt, 72)
            assert got.tokens == expected.tokens
            assert run.report()["accepted"] > before
            _holds_exactly(got.last, prompt + expected.tokens)


@pytest.mark.parametrize(("family", "scheme"), [("sliding64", "affine:8"), ("dense64", "turbo"), ("kv-shared64", "turbo"), ("dense64", "affine:8@60"), ("sliding64", "affine:4@60")])
def test_under_a_kv_scheme(family: str, scheme: str):
    """Also where the caches are converted in the middle of the answer: no verification goes past that."""
    model, _ = build(family)
    prompt = prompt_of(45)
    with plain(kv_scheme=scheme):
        expected = generate(model, prompt, 40)
    assert kinds.quantized(expected.last.prompt_cache)
    with speculation(3, lambda: Known(prompt, expected.tokens), kv_scheme=scheme) as run:
        for run.tokens in (3, 4):
            got = generate(model, prompt, 40)
            assert got.tokens == expected.tokens
            _holds_exactly(got.last, prompt + expected.tokens)
            assert kinds.signatures(got.last.prompt_cache) == kinds.signatures(expected.last.prompt_cache)
        assert run.report()["accepted"] > 0


@pytest.mark.parametrize("family", ["sliding", "hybrid"])
def test_wherever_it_ends_the_next_turn_goes_on_as_cold(family: str):
    """By length and by a stop sequence, at each place of a burst; the caches as they are, and through the file's form."""
    from mlx_lm.generate import StopSequences

    model, _ = build(family)
    prompt, more = prompt_of(45), prompt_of(3, seed=2)
    places = range(1, 12)
    with plain():
        answer = generate(model, prompt, 24).tokens
        colds = [generate(model, prompt + answer[:count] + more, 4).tokens for count in places]
    ends = []
    with speculation(4, lambda: Known(prompt, answer)):
        for count in places:
            by_stop = count % 2 == 0 and answer[count - 1] not in answer[: count - 1]
            stops = {"stop_sequences": StopSequences([[answer[count - 1]]])} if by_stop else {}
            ended = generate(model, prompt, 24 if by_stop else count, **stops).last
            assert ended.finish_reason == ("stop" if by_stop else "length")
            _holds_exactly(ended, prompt + answer[:count])
            ends.append(ended)
    with plain():
        for ended, cold in zip(ends, colds, strict=True):
            dumped = kinds.dump(ended.prompt_cache)
            read = kinds.load(dumped.descriptors, {name: mx.array(tensor.array) for name, tensor in dumped.tensors.items()})
            for caches in (read, ended.prompt_cache):
                assert generate(model, more, 4, caches=caches, held=ended.all_tokens).tokens == cold


@pytest.mark.parametrize("family", ["sliding"])
def test_sampled_tokens_are_those_of_plain_decoding_with_the_same_seed(family: str):
    from mlx_lm.sample_utils import make_sampler

    model, _ = build(family)
    prompt = prompt_of(45)

    def answer(seed: int) -> list[int]:
        mx.random.seed(seed)
        return generate(model, prompt, 40, samplers=make_sampler(temp=0.6, top_p=0.9)).tokens

    with plain():
        expected, other = answer(7), answer(8)
    with speculation(3, lambda: Known(prompt, expected)) as run:
        got = answer(7)
        counted = run.report()
    assert got == expected != other
    assert counted["acceptance"] > 0.2


def test_logits_processors_see_the_whole_history_and_no_rejected_draft():
    from mlx_lm.sample_utils import make_logits_processors

    model, _ = build("dense")
    prompt = prompt_of(45)

    def answer() -> tuple[list[int], list[list[int]]]:
        seen: list[list[int]] = []

        def note(context, logits):
            seen.append(context.tolist())
            return logits + 0.0

        processors = [note, *make_logits_processors(repetition_penalty=1.3, repetition_context_size=20)]
        return generate(model, prompt, 30, logits_processors=processors).tokens, seen

    with plain():
        expected, contexts = answer()
        unprocessed = generate(model, prompt, 30).tokens
    with speculation(4, lambda: Known(prompt, expected)) as run:
        got, seen = answer()
        assert run.report()["accepted"] > 0
    assert got == expected != unprocessed
    assert seen == contexts and contexts[-1] == prompt + expected


def test_a_source_of_nonsense_changes_no_token_and_one_that_fails_is_let_go():
    class Nonsense(Known):
        def draft(self, *given):
            return Draft([(token + 17) % 1000 for token in super().draft(*given).tokens])

    ended = []

    class Failing(Known):
        def draft(self, *given):
            raise RuntimeError("no drafts today")

        def end(self):
            ended.append("drafting")

    class Forgetful(Known):
        def verified(self, drafted, accepted):
            raise RuntimeError("what draft?")

        def end(self):
            ended.append("verified")

    model, _ = build("sliding")
    prompt = prompt_of(45)
    with plain():
        expected = generate(model, prompt, 40).tokens
    with speculation(4, lambda: Nonsense(prompt, expected)) as run:
        assert generate(model, prompt, 40).tokens == expected
        counted = run.report()
    assert counted["target_calls"] > 30 and counted["acceptance"] < 0.05
    with speculation(4, lambda: Failing(prompt, expected)) as run:
        assert generate(model, prompt, 40).tokens == expected
        assert run.faults() == {"drafting": 1} and run.report()["target_calls"] == 0
    with speculation(4, lambda: Forgetful(prompt, expected)) as run:
        assert generate(model, prompt, 40).tokens == expected
        assert run.faults() == {"drafting": 1} and run.report()["target_calls"] == 1
    assert ended == ["drafting", "verified"]


@pytest.mark.parametrize(
    ("family", "settings", "length"), [("sliding", {}, 45), ("sliding", {}, 2), ("hybrid", {}, 45), ("sliding64", {"kv_scheme": "affine:8@70"}, 45)]
)
def test_it_pauses_while_another_row_is_there(family: str, settings: dict, length: int):
    """Alone, then with a row that joins and leaves, then alone again, over caches that were padded meanwhile, rings where they are short for the window (32)."""
    model, _ = build(family)
    first, second = prompt_of(length), prompt_of(60, seed=3)
    with plain(**settings):
        expected = [generate(model, prompt, count).tokens for prompt, count in ((first, 64), (second, 9))]
    with speculation(3, lambda: Known(first, expected[0]), **settings) as run:
        made = generator(model)
        answers: dict[int, list[int]] = {uid: [] for uid in made.insert([first], max_tokens=[64])}
        calls = []
        while len(answers) < 2 or any(len(answer) < len(goal) for answer, goal in zip(answers.values(), expected, strict=True)):
            if len(answers) == 1 and len(answers[0]) > (15 if length > 30 else 2):
                calls.append(run.report()["target_calls"])
                answers |= {uid: [] for uid in made.insert([second], max_tokens=[9])}
            for response in made.next()[1]:
                answers[response.uid].append(response.token)
                if response.uid == 1 and response.finish_reason is not None:
                    calls.append(run.report()["target_calls"])
        made.close()
        calls.append(run.report()["target_calls"])
    assert list(answers.values()) == expected
    # While both decoded nothing was verified: at most the steps in which the second was prefilled.
    assert 0 < calls[0] <= calls[1] <= calls[0] + 3 < calls[2]


def test_a_model_with_a_cache_of_no_known_class_is_refused_by_name_when_it_is_loaded(caplog):
    class Unheard(KVCache):
        pass

    class Model:
        def make_cache(self):
            return [KVCache(), Unheard()]

    with speculation(4) as run:
        run.model_loaded(Model())
        assert "Unheard" in run.report()["refused"] and "Unheard" in caplog.text
        run.model_loaded(build("hybrid")[0])
        assert run.report()["refused"] is None
