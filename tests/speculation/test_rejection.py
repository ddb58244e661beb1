"""Speculative sampling: the distribution is the model's whatever is drafted, in each way that tokens are sampled, and where it cannot be told the sampler decides."""

from __future__ import annotations

import json
import math
import random
from argparse import Namespace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from speculative_runs import plain, speculation

from mlx_lm_hooks import Invocation
from mlx_lm_patches.drawing import Drawing, shown
from mlx_lm_tiered import plugin
from mlx_lm_tiered.bench import sampling
from mlx_lm_tiered.bench.sampling import TOKENS, Table, TableSource, chi_square
from mlx_lm_tiered.cli import main
from mlx_lm_tiered.speculation.acceptance import accepted_or_else
from mlx_lm_tiered.speculation.draft_model import DraftModelSource, Pair
from mlx_lm_tiered.speculation.source import Draft


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(5)
    random.seed(5)


def rows_of(count: int) -> tuple[mx.array, np.ndarray, np.ndarray]:
    """Log-probabilities (4, `count`) p, p itself, and another q for the same rows."""
    table = np.random.default_rng(3)
    p, q = (table.dirichlet(np.full(count, 0.7), 4) for _ in range(2))
    return mx.log(mx.array(p, mx.float32)), p, q


@pytest.mark.parametrize("drawn", [True, False])
def test_200_000_pairs_fit_the_models_distribution(drawn: bool):
    """The rule itself: first tokens by it, and behind each the second by it, from what was drafted behind that."""
    _, p, q = rows_of(4)
    many = 200_000
    tables = mx.array(p, mx.float32), mx.array(q, mx.float32)

    def next_of(tokens: mx.array) -> mx.array:
        target, proposal = (table[tokens] for table in tables)
        drafts = mx.random.categorical(mx.log(proposal)) if drawn else mx.argmax(proposal, axis=-1)
        return accepted_or_else(target, Draft(drafts.tolist(), proposal if drawn else None))

    first = next_of(mx.zeros((many,), mx.uint32))
    second = next_of(first)
    counts = np.zeros((4, 4), np.int64)
    np.add.at(counts, (np.array(first), np.array(second)), 1)
    assert chi_square(counts.sum(axis=1)[None], p[:1])["fits"]
    assert chi_square(counts, p)["fits"]


def test_generated_pairs_fit(tmp_path):
    """The same through batches, executor and caches, by the command, whose default are 200,000."""
    file = tmp_path / "figures.json"
    assert main(["bench", "sampling", "--samples", "2000", "--json", str(file)]) == 0
    drawn, likeliest, target = json.loads(file.read_text())["rows"]
    for found in (drawn, likeliest, target):
        assert found["fits"], found
        assert (found["rejection_requests"] > 0) == (found["rule"] == "rejection")
        assert 0.1 < found["acceptance"] < 0.95 and found["target_calls"] < found["samples"] == 2000
    assert drawn["acceptance"] > likeliest["acceptance"] + 0.05, "more should be accepted of drafts that are drawn"


def test_a_draft_models_drafts_are_drawn_and_fit():
    """Verified a token at a time, too."""
    tables = np.random.default_rng(2)
    model = Table(tables.normal(0, 1.5, (TOKENS, TOKENS)))
    small = Table(np.array(model.table) + tables.normal(0, 1, (TOKENS, TOKENS)))
    for strict in (False, True):
        with speculation(3, spec_sampling="rejection", spec_strict=strict) as run:
            run.source = DraftModelSource(Path("small"))
            run.source.refuses, run.source._pair = lambda model: "", Pair(small, TOKENS, TOKENS)
            counts = sampling.pairs(model, 1000, make_sampler(temp=0.7, top_k=6))
            assert 0.2 < run.report()["acceptance"] < 0.95 and run.faults() == {}
        weights = np.exp(np.array(model.table) / 0.7)
        weights[weights < np.sort(weights, axis=-1)[:, 2:3]] = 0  # the two least likely of eight
        assert chi_square(counts, weights / weights.sum(axis=-1, keepdims=True))["fits"]


def test_a_wrong_distribution_does_not_fit():
    """That the test can fail: pairs of one temperature against another's."""
    counts = np.random.default_rng(0).multinomial(400, sampling.reference(np.eye(4), 0.8, 1.0))
    assert chi_square(counts, sampling.reference(np.eye(4), 0.8, 1.0))["fits"]
    assert not chi_square(counts, sampling.reference(np.eye(4), 1.3, 1.0))["fits"]
    assert not chi_square(counts, np.eye(4))["fits"]


@pytest.mark.parametrize("many", [False, True])
def test_logits_processors_keep_their_history(many: bool):
    """Each token depends on the two before it, by a processor that looks at the context of the position."""
    tables = np.random.default_rng(4).normal(0, 1.5, (2, 4, 4))
    before = mx.array(tables[1], mx.float32)
    whole = Table(tables[0])
    contexts: list[list[int]] = []

    def processor(tokens, logits):
        contexts.append(tokens.tolist())
        return logits + before[tokens[-2]]

    with speculation(3, spec_sampling="rejection") as run:
        from mlx_lm.generate import BatchGenerator, generate_step  # as it is now

        run.source = TableSource(whole, drawn=True)
        if many:
            made = BatchGenerator(whole, max_tokens=1500)
            made.insert([[0, 0]], samplers=[make_sampler(temp=1.0)], logits_processors=[[processor]])
            tokens = [0, 0]
            while len(tokens) < 1502:
                tokens += [response.token for response in made.next()[1]]
            made.close()
        else:
            steps = generate_step(mx.array([0, 0]), whole, max_tokens=1500, sampler=make_sampler(temp=1.0), logits_processors=[processor])
            tokens = [0, 0, *(token for token, _ in steps)]
        assert run.report()["rejection_requests"] == 1 and run.report()["accepted"] > 150
    counts = np.zeros((16, 4), np.int64)
    np.add.at(counts, (np.array(tokens[:-2]) * 4 + tokens[1:-1], tokens[2:]), 1)
    logits = tables[1][:, None] + tables[0][None]
    assert chi_square(counts, sampling.reference(logits.reshape(16, 4), 1.0, 1.0))["fits"]
    # One call for each token, with exactly what was emitted before it.
    assert contexts[-1] in (tokens, tokens[:-1]) and all(later[:-1] == one for one, later in zip(contexts, contexts[1:], strict=False))


@pytest.mark.parametrize(
    "settings",
    [{"temp": 0.7}, {"temp": 1.3, "top_p": 0.8}, {"temp": 1.0, "top_k": 3}, {"temp": 0.9, "min_p": 0.2}, {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1}],
)
def test_what_a_sampler_draws_from_is_what_it_draws(settings: dict):
    sampler = make_sampler(**settings)
    logprobs, _, _ = rows_of(6)
    logprobs = logprobs[:1]
    times = 400 if "xtc_probability" in settings else 1  # which tosses a coin for each call
    many = mx.broadcast_to(logprobs, (8000 // times, 6))
    counts = np.zeros(6, np.int64)
    expected = np.zeros(6)
    for _ in range(times):
        counts += np.bincount(np.array(sampler(many)), minlength=6)
    for _ in range(times):
        expected += np.array(shown(sampler)(logprobs))[0] / times
    found = chi_square(counts[None], expected[None])
    if times == 1:
        assert found["fits"]
    else:  # both are of a random number of coins
        assert np.abs(counts / counts.sum() - expected).max() < 0.1 and (expected[counts > 0] > 0).all()


def test_each_position_has_a_coin_of_its_own():
    class Row(Drawing):
        _sampler = staticmethod(make_sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1))
        _processors, _seeded = (), False

    assert Row().draws == "random" and Row().independent and not Row().together
    rows = np.array(Row().probabilities(mx.broadcast_to(rows_of(6)[0][:1], (64, 6))))
    assert rows.shape == (64, 6) and len(np.unique(rows, axis=0)) == 2


def test_what_does_not_show_itself_is_not_guessed():
    assert shown(lambda logprobs: mx.argmax(logprobs, axis=-1)) is None
    assert shown(mx.argmax) is None

    class Custom:
        def __call__(self, logprobs):
            return mx.random.categorical(logprobs)

    model = Table(np.zeros((TOKENS, TOKENS)))
    with speculation(3, spec_sampling="rejection") as run:
        run.source = TableSource(model, drawn=True)
        counts = sampling.pairs(model, 200, Custom())
        assert counts.sum() == 200 and run.report()["rejection_requests"] == 0
        assert run.faults() == {"rejection_sampling": 1}


def test_greedy_requests_are_those_of_plain_decoding():
    from mlx_lm.sample_utils import greedy_sampler

    model = Table(np.random.default_rng(1).normal(0, 1, (TOKENS, TOKENS)))
    with plain():
        expected = sampling.pairs(model, 300, greedy_sampler)
    with speculation(3, spec_sampling="rejection") as run:
        run.source = TableSource(model, drawn=True)
        assert (sampling.pairs(model, 300, greedy_sampler) == expected).all()
        assert run.report()["rejection_requests"] == 0 and run.report()["acceptance"] == 1.0 and run.faults() == {}


def test_a_commands_seed_keeps_its_output():
    """Of ``mlx_lm.generate --seed``: plain decoding's tokens."""
    args = Namespace(speculation="ngram", spec_sampling="rejection", seed=3)
    for given, rule in (({"speculation", "spec_sampling"}, "rejection"), ({"speculation", "spec_sampling", "seed"}, "target")):
        plugin.mlx_lm_configure(Invocation("generate", args, frozenset(given)))
        try:
            assert plugin.current().speculation().report()["sampling"] == rule
        finally:
            plugin.mlx_lm_unconfigure()


def test_of_equal_distributions_every_draft_is_accepted():
    p = mx.array(np.random.default_rng(0).dirichlet(np.ones(5), 2000), mx.float32)
    drafts = mx.random.categorical(mx.log(p)).tolist()
    assert accepted_or_else(p, Draft(drafts, p)).tolist() == drafts
    last = accepted_or_else(p, Draft([])).tolist()
    assert len(last) == 2000 and 0 <= min(last) and max(last) < 5 and not math.isnan(sum(last))
