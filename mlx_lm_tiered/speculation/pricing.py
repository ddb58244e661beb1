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
# Each is measured so often, or until so many seconds have passed: the least counts.
TIMES, ENOUGH = 3, 0.25
# Steps that follow each other while they are measured, few and twice as many; of steps longer than that, in seconds, one: there the host is nothing.
STEPS, LONG = 6, 0.1


def price(model: Any, source: DraftSource) -> Price:
    """Measure it with new caches. Where the source's own forwards fail, or the model's, so does this."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    step, late = least(lambda: _steps(model, caches, 1)), 0.0
    if step < LONG:
        few, twice = (least(lambda count=count: _steps(model, caches, count)) for count in (STEPS, 2 * STEPS))  # type: ignore[misc]
        # Both begin with a step that overlaps with none.
        step = min(max(twice - few, few / 2), twice / 2) / STEPS
        late = max(few - STEPS * step, 0.0)
    rounds = {width: least(lambda width=width: _verified(model, caches, width)) for width in WIDTHS}  # type: ignore[misc]
    return Price(step, rounds, late, *source.price(model, step))


def least(run: Callable[[], None]) -> float:
    """Seconds of the fastest of some runs, behind one that may compile kernels."""
    run()
    seconds: list[float] = []
    while len(seconds) < TIMES and sum(seconds) < ENOUGH:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


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
