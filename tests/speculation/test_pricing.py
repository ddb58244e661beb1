"""What ``auto`` measures before anything is drafted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from families import build
from mlx_lm import load

from mlx_lm_tiered.speculation import pricing
from mlx_lm_tiered.speculation.assistant.source import AssistantSource
from mlx_lm_tiered.speculation.draft_model import DraftModelSource
from mlx_lm_tiered.speculation.ngram import NGramSource

MODELS = Path(__file__).parents[1] / "models"


def sleeping(monkeypatch, step: float, overlap: float, each: float) -> None:
    """Forwards that take that long: a step of which `overlap` is done while the one before runs, and `each` for each token of a round beside a step."""
    monkeypatch.setattr(pricing, "_steps", lambda model, caches, count: time.sleep(step + (count - 1) * (step - overlap)))
    monkeypatch.setattr(pricing, "_verified", lambda model, caches, width: time.sleep(step + each * (width - 1)))


def test_a_step_is_what_it_takes_behind_another_and_a_round_overlaps_with_none(monkeypatch):
    sleeping(monkeypatch, 0.02, 0.01, 0.005)
    found = pricing.price(build("dense")[0], NGramSource())
    assert found.step == pytest.approx(0.01, rel=0.2) and found.late == pytest.approx(0.01, rel=0.2)
    assert found.rounds == pytest.approx({2: 0.025, 3: 0.03, 5: 0.04}, rel=0.2)
    assert found.draft == found.behind == 0


def test_of_a_slow_model_few_forwards_are_measured(monkeypatch):
    sleeping(monkeypatch, 0.25, 0.0, 0.0)
    began = time.perf_counter()
    found = pricing.price(build("dense")[0], NGramSource())
    assert found.step == pytest.approx(0.25, rel=0.1) and found.late == pytest.approx(0, abs=0.02)
    assert time.perf_counter() - began < 0.25 * 20


def test_a_pause_in_one_turn_is_no_price():
    turns = iter([0.01, 0.2, 0.01, 0.01, 0.01])
    assert pricing.least(lambda: time.sleep(next(turns)))[0] == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_every_kind_of_cache_can_be_measured(family: str):
    found = pricing.price(build(family)[0], NGramSource())
    assert found.step > 0 and found.late >= 0 and min(found.rounds.values()) > 0


def test_what_drafts_with_a_model_says_what_that_takes():
    model = load(str(MODELS / "tiny-gemma4_text"))[0]
    for source in DraftModelSource(MODELS / "tiny-llama"), AssistantSource(MODELS / "assistant-gemma4_text"):
        assert source.refuses(model) == ""
        found = pricing.price(model, source)
        assert 0 < found.draft < 20 * found.step and (found.behind > 0) == (source.name == "draft")
