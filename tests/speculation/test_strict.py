"""Strict verification: plain decoding's numbers to the last bit, where one forward of several tokens rounds differently; nothing to take back."""

from __future__ import annotations

from argparse import Namespace

import mlx.core as mx
import pytest
from families import build
from speculative_runs import Known, generate, generator, plain, speculation
from test_sequences import generated, prompt_of

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.settings import AUTO, Settings
from mlx_lm_tiered.speculation.choose import Drafting
from mlx_lm_tiered.speculation.options import check


def model_of(family: str, dtype: mx.Dtype):
    model, _ = build(family)
    model.set_dtype(dtype)
    return model


def differences(one, other) -> int:
    """In how many places log-probabilities are not the same to the last bit."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return sum(not mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.parametrize(("family", "dtype"), [("sliding", mx.float32), ("hybrid", mx.float32), ("sliding", mx.bfloat16)])
def test_in_a_batch_the_numbers_are_plain_decodings(family: str, dtype: mx.Dtype):
    model, prompt = model_of(family, dtype), prompt_of(45)
    with plain():
        expected = generate(model, prompt, 40)
    if dtype == mx.float32:  # on CPUs mlx multiplies 16 bits without BLAS, row by row
        with speculation(3, lambda: Known(prompt, expected.tokens)):
            assert differences(generate(model, prompt, 40), expected) > 0, "verifying at once rounds the same here, so this test shows nothing"
    with speculation(3, lambda: Known(prompt, expected.tokens), spec_strict=True) as run:
        got = generate(model, prompt, 40)
        counted = run.report()
    assert got.tokens == expected.tokens and differences(got, expected) == 0
    assert got.last.all_tokens == prompt + expected.tokens and kinds.length(got.last.prompt_cache) in (85, None)
    assert counted["strict"] and counted["replays"] == 0
    # A forward for each token, as without.
    assert 0 < counted["accepted"] < counted["drafted"] and counted["accepted"] < counted["target_calls"] <= 40
    assert counted["mean_accepted"] > 1


@pytest.mark.parametrize("family", ["sliding", "hybrid"])
def test_outside_a_batch_the_caller_may_stop_anywhere(family: str):
    model, prompt = model_of(family, mx.bfloat16), prompt_of(45)
    with plain():
        expected, _ = generated(model, prompt, 24)
        turns = [generated(model, prompt + expected[:count] + [7, 8], 4)[0] for count in range(1, 6)]
    with speculation(4, lambda: Known(prompt, expected), spec_strict=True) as run:
        assert generated(model, prompt, 24)[0] == expected
        stopped = [generated(model, prompt, 24, close_at=count) for count in range(1, 6)]
        assert run.report()["accepted"] > 0
    with plain():
        for count, ((tokens, caches), turn) in enumerate(zip(stopped, turns, strict=True), 1):
            assert tokens == expected[:count] and kinds.length(caches) in (45 + count, None)
            assert generated(model, [7, 8], 4, caches)[0] == turn


def test_another_row_may_join_in_the_middle_of_a_draft():
    model, _ = build("sliding")
    first, second = prompt_of(45), prompt_of(60, seed=3)
    with plain():
        expected = [generate(model, prompt, count).tokens for prompt, count in ((first, 40), (second, 5))]

    asked, again = [], 0

    class Right(Known):
        def draft(self, *given):
            asked.append(len(given[0]))
            self.count = given[2]  # the next draft is right to its end
            return super().draft(*given)

    with speculation(8, lambda: Right(first, expected[0]), spec_strict=True) as run:
        made = generator(model)
        answers = {uid: [] for uid in made.insert([first], max_tokens=[40])}
        while any(len(answer) < len(goal) for answer, goal in zip(answers.values(), expected, strict=False)) or len(answers) < 2:
            if len(answers) == 1 and len(answers[0]) == 4:
                answers |= {uid: [] for uid in made.insert([second], max_tokens=[5])}
            for response in made.next()[1]:
                answers[response.uid].append(response.token)
                if response.uid == 1 and response.finish_reason is not None:
                    again = len(first) + len(answers[0])
        made.close()
        assert run.faults() == {} and run.report()["accepted"] > 15
    assert list(answers.values()) == expected
    # What was left of the draft went when others decoded: alone again, it drafts anew at once.
    assert again in asked and again > asked[0] + 5


def check_given(source: str = "ngram", given: frozenset[str] = frozenset({"spec_strict"}), **settings) -> None:
    check(Settings(spec_strict=True, **settings), Drafting(source), Invocation("server", Namespace(), given))


def test_what_does_nothing_is_refused():
    check_given()
    check_given("draft")
    check_given("off", given=frozenset())  # the environment's
    with pytest.raises(UsageError, match="--spec-strict does nothing without --speculation"):
        check_given("off")
    with pytest.raises(UsageError, match="none pays"):
        check_given(num_draft_tokens=AUTO)
