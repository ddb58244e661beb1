"""Whether speculation keeps the distribution of sampled tokens: a chi-square test of pairs of tokens that follow each other.

The model is a table, whose logits depend on the last token alone, so the
exact probability of each pair is known. Drafts come from another table, drawn at random or its likeliest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_lm_tiered import disable, enable, stats

from ..speculation.ngram import NGramSource
from ..speculation.source import Draft

TOKENS = 8
# Tokens of one answer: many begin anew, so that the first tokens and the last are looked at as well.
ANSWER = 1000
# A right distribution fails once in so many runs.
SELDOM = 1e-4


class Table(nn.Module):
    """A model of `TOKENS` tokens whose logits are a row of a table, the last token's."""

    def __init__(self, table: np.ndarray):
        super().__init__()
        self.table = mx.array(table, mx.float32)
        self.layers = [nn.Identity()]

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        nothing = mx.zeros((inputs.shape[0], 1, inputs.shape[1], 1))
        cache[0].update_and_fetch(nothing, nothing)
        return self.table[inputs]


class TableSource:
    """Implements `DraftSource` over a table; `drawn` says whether drafts are drawn where the request allows it."""

    name, tokens = "table", 3

    def __init__(self, table: Table, drawn: bool):
        self._logprobs = table.table - mx.logsumexp(table.table, axis=-1, keepdims=True)
        self._drawn = drawn

    def refuses(self, model: Any) -> str:
        return ""

    def begin(self, model: Any) -> _Drafter:
        return _Drafter(self._logprobs, self._drawn)

    def price(self, model: Any) -> None:
        return None

    def report(self) -> None:
        return None


class _Drafter:
    computed = 0

    def __init__(self, logprobs: mx.array, drawn: bool):
        self._likeliest = np.array(logprobs).argmax(axis=-1).tolist()
        self._logprobs = logprobs
        self._drawn = drawn
        self._rows: list[list[float]] | None = None

    def hopes(self, tokens: Sequence[int], worth: Callable[[int], bool] | None = None) -> bool:
        return True

    def draft(self, tokens: Sequence[int], pending: int, most: int, caches: Any, probabilities: Callable[[Any], Any] | None = None) -> Draft:
        drafts, last = [], pending
        if probabilities is None or not self._drawn:
            for _ in range(most):
                drafts.append(last := self._likeliest[last])
            return Draft(drafts)
        if self._rows is None:
            self._rows = probabilities(self._logprobs).tolist()
        drawn_from = []
        for _ in range(most):
            drawn_from.append(self._rows[last])
            drafts.append(last := random.choices(range(len(self._rows)), self._rows[last])[0])
        return Draft(drafts, mx.array(drawn_from))

    def verified(self, drafted: int, accepted: int) -> None:
        pass

    def end(self) -> None:
        pass


def run(samples: int, rule: str, drawn: bool, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0) -> dict[str, Any]:
    """Sample so many pairs under a rule of ``--spec-sampling``. `fits` says whether a right distribution would be as far off once in 10,000 runs."""
    from mlx_lm.sample_utils import make_sampler

    random_table = np.random.default_rng(1)
    model = Table(random_table.normal(0, 1.5, (TOKENS, TOKENS)))
    drafts = Table(np.array(model.table) + random_table.normal(0, 1, (TOKENS, TOKENS)))
    mx.random.seed(seed)
    random.seed(seed)
    source, begin = TableSource(drafts, drawn), NGramSource.begin
    enable(speculation="ngram", num_draft_tokens=TableSource.tokens, spec_sampling=rule, prompt_cache_bytes=0)
    # The settings know no tables: the n-grams' drafts come from one here.
    NGramSource.begin = lambda self, model=None: source.begin(model)  # type: ignore[method-assign, assignment, return-value]
    try:
        counts = pairs(model, samples, make_sampler(temp=temperature, top_p=top_p))
        report = (stats() or {})["speculation"]
    finally:
        NGramSource.begin = begin  # type: ignore[method-assign]
        disable()
    found = chi_square(counts, reference(np.array(model.table), temperature, top_p))
    figures = {name: report[name] for name in ("rejection_requests", "acceptance", "mean_accepted", "target_calls")}
    return {"rule": rule, "drawn": drawn, "samples": int(counts.sum()), **found, **figures}


def pairs(model: Table, samples: int, sampler: Callable[[Any], Any]) -> np.ndarray:
    """Counts (first token, second token) of pairs in answers of `ANSWER` tokens."""
    from mlx_lm.generate import BatchGenerator

    counts = np.zeros((TOKENS, TOKENS), np.int64)
    left = samples
    while left > 0:
        generator = BatchGenerator(model, max_tokens=min(left, ANSWER))
        try:
            generator.insert([[left % TOKENS]], samplers=[sampler])
            tokens, ended = [left % TOKENS], False
            while not ended:
                for response in generator.next()[1]:
                    tokens.append(response.token)
                    ended = response.finish_reason is not None
        finally:
            generator.close()
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        left -= len(tokens) - 1
    return counts


def reference(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """The probabilities (rows, tokens) of mlx-lm's sampler: of the tokens that have, the likeliest first, less than `top_p` before them, at that temperature."""
    whole = np.exp(logits - logits.max(axis=-1, keepdims=True))
    whole /= whole.sum(axis=-1, keepdims=True)
    order = np.argsort(-whole, axis=-1)
    above = np.cumsum(np.take_along_axis(whole, order, -1), axis=-1) - np.take_along_axis(whole, order, -1)
    kept = np.empty(whole.shape, bool)
    np.put_along_axis(kept, order, above < top_p, -1)
    weights = np.where(kept, whole ** (1 / temperature), 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """Pearson's test of counts (rows, tokens) against each row's probabilities; `p_value` by Wilson and Hilferty's approximation."""
    expected = counts.sum(axis=-1, keepdims=True) * probabilities
    possible = expected > 0
    statistic = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    freedom = max(int((possible.sum(axis=-1) - 1).clip(0).sum()), 1)
    spread = 2 / (9 * freedom)
    p_value = 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))
    impossible = int(counts[~possible].sum())
    return {"chi_square": statistic, "degrees_of_freedom": freedom, "p_value": p_value, "impossible": impossible, "fits": impossible == 0 and p_value > SELDOM}
