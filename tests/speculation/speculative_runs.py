"""Generations in mlx-lm's batches, with and without speculation, and draft sources of the tests' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mlx_lm_hooks import disable, enable
from mlx_lm_tiered.plugin import current
from mlx_lm_tiered.speculation import ngram
from mlx_lm_tiered.speculation.source import Draft


class Ended(NamedTuple):
    """An answer: its tokens, their log-probabilities, and upstream's last response."""

    tokens: list[int]
    logprobs: list[Any]
    last: Any


class Known:
    """A drafter that knows the answer: each draft is right up to a place that moves from draft to draft, and wrong behind."""

    computed = 0

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]):
        self.start, self.answer, self.count = len(prompt), answer, 0

    def hopes(self, tokens: Sequence[int], worth: Any = None) -> bool:
        return True

    def draft(self, tokens: Sequence[int], pending: int, most: int, caches: Any, probabilities: Any = None) -> Draft:
        at = len(tokens) - self.start
        right, self.count = self.count % (most + 1), self.count + 1
        following = self.answer[at + 1 : at + 1 + most]
        return Draft([token if place < right else (token + 1) % 100 + 3 for place, token in enumerate(following)])

    def verified(self, drafted: int, accepted: int) -> None:
        assert accepted <= drafted

    def end(self) -> None:
        self.ended = True


@contextmanager
def speculation(tokens: int, drafter: Callable[[], Any] | None = None, **settings: Any):
    """The plugin on with speculation of that many tokens; `drafter` makes what drafts, instead of the n-grams. Gives the run's speculation."""
    enable("tiered", **{"speculation": "ngram", "prompt_cache_bytes": 0, **settings})
    begin = ngram.NGramSource.begin
    try:
        runtime = current()
        run = runtime.speculation()
        run.tokens, run.faults = tokens, lambda: runtime.report()["faults"]
        if drafter is not None:
            ngram.NGramSource.begin = lambda self, model=None: drafter()
        yield run
    finally:
        ngram.NGramSource.begin = begin
        disable()


@contextmanager
def plain(**settings: Any):
    """Without speculation: the plugin on with these settings, or mlx-lm as it is."""
    if not settings:
        yield
        return
    enable("tiered", **{"prompt_cache_bytes": 0, **settings})
    try:
        yield
    finally:
        disable()


def generator(model: Any, **options: Any) -> Any:
    from mlx_lm.generate import BatchGenerator

    return BatchGenerator(model, prefill_step_size=64, **options)


def generate(model: Any, prompt: Sequence[int], count: int, *, caches: Any = None, held: Sequence[int] = (), **options: Any) -> Ended:
    """Generate alone in a batch; `caches` hold `held`, what `prompt` goes on from."""
    made = generator(model)
    try:
        made.insert(
            [list(prompt)], max_tokens=[count], caches=None if caches is None else [caches], all_tokens=[list(held)],
            **{name: [value] for name, value in options.items()},
        )  # fmt: skip
        return collect(made)
    finally:
        made.close()


def collect(made: Any) -> Ended:
    """The answer of the only row."""
    tokens: list[int] = []
    logprobs: list[Any] = []
    while True:
        for response in made.next()[1]:
            tokens.append(response.token)
            logprobs.append(response.logprobs)
            if response.finish_reason is not None:
                return Ended(tokens, logprobs, response)
