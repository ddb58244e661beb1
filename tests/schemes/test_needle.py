"""``mlx_lm.tiered bench needle``: what it hides, and what counts as found."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import load
from support.models import TINY

from mlx_lm_tiered.bench import needle
from mlx_lm_tiered.schemes.spec import parse


@pytest.fixture(scope="module")
def loaded():
    return load(str(TINY["llama"]))


def test_the_needle_lies_once_at_its_depth_and_the_question_comes_last(loaded):
    _, tokenizer = loaded
    places = []
    for depth in (0.1, 0.5, 0.9, 1.0):
        text = tokenizer.decode(needle.haystack(tokenizer, 600, "Oslo", "1234567", depth))
        assert text.count("1234567") == 1 and text.endswith(needle.QUESTION.format(city="Oslo"))
        places.append(text.index("1234567") / len(text))
        sentence = text[: text.index("One of the special")]
        assert sentence.endswith(". ") or not sentence
    assert places == sorted(places) and abs(places[0] - 0.1) < 0.15 and abs(places[1] - 0.5) < 0.15


def test_found_is_what_the_model_says_by_itself(loaded, monkeypatch):
    model, tokenizer = loaded
    prompt = tokenizer.encode("Once upon a time there was a lighthouse")
    said: list[int] = []
    for _ in range(4):
        said.append(mx.argmax(model(mx.array([[*prompt, *said]]))[0, -1]).item())
    monkeypatch.setattr(needle, "_tokens_of", lambda tokenizer, wanted: said)
    found, nats = needle.ask(model, tokenizer, parse("bf16"), prompt, "")
    other = [said[0], said[1], (said[2] + 1) % 100, said[3]]
    monkeypatch.setattr(needle, "_tokens_of", lambda tokenizer, wanted: other)
    missed, more = needle.ask(model, tokenizer, parse("bf16"), prompt, "")
    assert found and not missed and more > nats > 0


def test_rows_are_of_the_schemes(loaded):
    result = needle.run(TINY["llama"], ["bf16", "affine:8:32"], tokens=90, cases=2)
    full, eight = result["rows"]
    assert [row["scheme"] for row in result["rows"]] == ["bf16", "affine:8:32"] and full["of"] == eight["of"] == 2
    assert full["nats"] == pytest.approx(eight["nats"], abs=0.1) and full["nats"] != eight["nats"]
