"""What a step and a round take with a model, measured by some forwards before anything is drafted: what ``auto`` begins with.

A step of plain decoding overlaps with the one before it: the host builds the next graph while the device works. A round
cannot, as its tokens have to be known first, and neither can the step behind it. On a GPU, where a small model's step is
mostly the host's, that alone makes a round cost nearly two steps, whatever it verifies, and the step behind it another one.
So each is measured the way it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .costs import AGAIN, FIRST
from .source import DraftSource, Price

# Tokens that are verified together: with one draft, and with as many as `auto` begins with and comes back with.
WIDTHS = (2, AGAIN + 1, FIRST + 1)
# Each is measured so often, in turns, as the machine may be slower for a while; or until so many seconds have passed. The least counts.
TIMES, ENOUGH = 4, 1.0
# Steps that follow each other while they are measured; of steps longer than that, in seconds, one: there the host is nothing.
STEPS, LONG = 8, 0.2


def price(model: Any, source: DraftSource) -> Price:
    """Measure it with new caches. Where the source's own forwards fail, or the model's, so does this."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)

    def steps(count: int) -> Callable[[], None]:
        return lambda: _steps(model, caches, count)

    def verified(width: int) -> Callable[[], None]:
        return lambda: _verified(model, caches, width)

    (alone,) = least(steps(1))
    count = STEPS if alone < LONG else 1
    one, many, *rounds = least(steps(1), steps(count), *map(verified, WIDTHS))
    # The first of them overlaps with none, like one by itself.
    step = (many - one) / (count - 1) if count > 1 else one
    step = min(max(step, many / count / 2), one)
    return Price(step, dict(zip(WIDTHS, rounds, strict=True)), one - step, *source.price(model, step))


def least(*runs: Callable[[], None]) -> list[float]:
    """Seconds of the fastest of each run's turns, behind one that may compile kernels."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    while len(seconds[0]) < TIMES and sum(map(sum, seconds)) < ENOUGH:
        for run, taken in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
    return [min(taken) for taken in seconds]


def _steps(model: Any, caches: list[Any], count: int) -> None:
    """Plain decoding as a generator does it: a step is built before the token of the one before is known."""
    before, token = None, mx.zeros((1,), mx.uint32)
    for _ in range(count):
        logits = model(token[None], cache=caches)[:, -1]
        token = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
        mx.async_eval(token)
        if before is not None:
            before.tolist()
        before = token
    token.tolist()


def _verified(model: Any, caches: list[Any], width: int) -> None:
    """The forward of a round: all its tokens are known before, and what is sampled behind each of them when it ends."""
    logits = model(mx.array([[0] * width]), cache=caches)[0]
    mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1).tolist()
