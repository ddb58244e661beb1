"""Batches as the server makes them, of rows that come, leave and go on from earlier ones at random: each row is as it would be alone.

Alone means a loop of the model's own over fresh caches, quantized at the scheme's start,
so that nothing is shared with the batch. Rounding may move a quantized number by one
step, so log-probabilities are compared within `NOISE`, which a token too few or too many
in sight exceeds by far, and tokens where the best one leads.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from scheme_families import WIDE, wide
from scheme_runs import prompt, scheme

from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.schemes.convert import convert
from mlx_lm_tiered.schemes.spec import parse
from support.cache_bytes import through_bytes

NOISE = 0.2
LENGTHS = (1, 2, 7, 31, 32, 33, 40, 41, 64, 90)  # around the window of 32 and the start
RUNS = [
    ("dense", "affine:8:32@40", 12), ("sliding", "affine:8:32", 3), ("sliding", "affine:8:32@40", 4), ("kv-donors", "affine:8:32@33", 5),
    ("sinks", "affine:6:32@40", 7), ("sliding", "bf16", 10), ("sliding", "turbo:k8v8@40", 4),
]  # fmt: skip


class Row(NamedTuple):
    tokens: list[int]
    answer: list[int]
    logprobs: list[Any]


def by_itself(model: Any, tokens: list[int], count: int, text: str) -> tuple[list[int], list[Any]]:
    """`count` greedy tokens after `tokens` and their log-probabilities."""
    from mlx_lm.models.cache import make_prompt_cache

    spec = parse(text)
    caches = make_prompt_cache(model)
    answer: list[int] = []
    logprobs = []
    todo, held = list(tokens), 0
    while len(answer) < count:
        n = min(len(todo), spec.start - held) if spec.start > held else len(todo)
        logits = model(mx.array([todo[:n]]), cache=caches)[0, -1]
        held, todo = held + n, todo[n:]
        if spec.form is not None and spec.start and held == spec.start:
            convert(caches, spec.form, spec.start)
        if not todo:
            logprobs.append(np.array(logits - mx.logsumexp(logits)))
            answer.append(int(logprobs[-1].argmax()))
            todo = answer[-1:]
    return answer, logprobs


class Batch:
    """A `BatchGenerator` that random requests come to."""

    def __init__(self, model: Any, seed: int):
        from mlx_lm.generate import BatchGenerator

        self.random = random.Random(seed)
        step = self.random.choice((8, 16, 32, 33))
        self.generator = BatchGenerator(model, completion_batch_size=4, prefill_batch_size=4, prefill_step_size=step)
        self.rows: dict[int, Row] = {}
        self.ended: list[tuple[list[int], list[Any]]] = []  # what rows left: their tokens and caches

    def run(self, count: int) -> None:
        arrivals = sorted(self.random.randrange(50) for _ in range(count))
        now = 0
        while arrivals or self.generator._find_uids(list(self.rows)):
            while arrivals and arrivals[0] <= now:
                arrivals.pop(0)
                self._insert()
            for response in self.generator.next()[1]:
                row = self.rows[response.uid]
                row.answer.append(response.token)
                row.logprobs.append(np.array(response.logprobs).reshape(-1))
                if response.finish_reason:
                    self._leaves(list(response.all_tokens), response.prompt_cache)
            if self.random.random() < 0.05 and (live := list(self.generator._find_uids(list(self.rows)))):
                left = self.generator.remove([self.random.choice(live)], return_prompt_caches=self.random.random() < 0.7)
                for caches, tokens in left.values():
                    self._leaves(list(tokens), caches)
            now += 1
            assert now < 600
        self.generator.close()

    def _leaves(self, tokens: list[int], caches: list[Any]) -> None:
        held = kinds.length(caches)
        if held is not None:
            assert held == len(tokens)
            self.ended.append((tokens, caches))

    def _insert(self) -> None:
        """A prompt in segments of any length, of which some go on from what earlier rows held."""
        tokens = [self.random.randrange(3, 1000) for _ in range(self.random.choice(LENGTHS))]
        held: list[int] = []
        caches = None
        if self.ended and self.random.random() < 0.6:
            before, kept = self.random.choice(self.ended)
            cut = self.random.choice((len(before), self.random.randrange(1, len(before) + 1)))
            if kinds.can_cut(kept, cut):
                kept = self.random.choice((lambda: kept, lambda: through_bytes(kept), lambda: through_bytes(kept, room=300)))()
                caches, held = kinds.lend(kept, cut), before[:cut]
        segments, rest = [], tokens
        while rest:
            n = self.random.choice((1, 2, 9, 17, 40, 1000))
            segments.append(rest[:n])
            rest = rest[n:]
        more = {} if caches is None else {"caches": [caches], "all_tokens": [list(held)]}
        (uid,) = self.generator.insert_segments([segments], [self.random.randrange(1, 30)], **more)
        self.rows[uid] = Row(held + tokens, [], [])


@pytest.mark.parametrize(("family", "text", "seed"), RUNS)
def test_every_row_is_as_alone(monkeypatch, family, text, seed):
    if text.startswith("turbo"):
        monkeypatch.setitem(WIDE, family, WIDE[family] | {"head_dim": 64})
    with scheme(text):
        model = wide(family)
        batch = Batch(model, seed)
        batch.run(6)
        compared = 0
        for row in batch.rows.values():
            answer, logprobs = by_itself(model, row.tokens, len(row.answer), text)
            for mine, expected, seen, alone in zip(row.answer, answer, row.logprobs, logprobs, strict=True):
                assert np.abs(seen - alone).max() < NOISE
                if mine != expected:
                    best = np.sort(alone)[-2:]
                    assert best[1] - best[0] < NOISE
                    break  # from here on it is another text
                compared += 1
        assert compared > 30 and len(batch.ended) >= 3


@pytest.mark.parametrize("text", ["bf16", "affine:8:32"])
def test_a_chunk_of_one_token_does_not_hide_another_from_the_next(text):
    """In a batch of full rings with padding, which mlx-lm's mask of the next chunk takes for rings in order."""
    long, short = prompt(47, 1), prompt(18, 2)
    with scheme(text):
        from mlx_lm.generate import BatchGenerator

        model = wide("sliding")
        generator = BatchGenerator(model, prefill_step_size=64)
        # The shorter row is padded; both then have a chunk of a single token, and a longer one.
        for tokens, first in ((long, 40), (short, 12)):
            generator.insert_segments([[tokens[:first], tokens[first : first + 1], tokens[first + 1 :]]], [2])
        answers: dict[int, list[Any]] = {}
        for _ in range(8):
            for response in generator.next()[1]:
                answers.setdefault(response.uid, []).append(np.array(response.logprobs).reshape(-1))
        generator.close()
        for tokens, seen in zip((long, short), (answers[0], answers[1]), strict=True):
            _, alone = by_itself(model, tokens, 2, text)
            assert max(np.abs(a - b).max() for a, b in zip(seen, alone, strict=True)) < NOISE
