"""Requests that join a batch and leave it at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.generate import BatchGenerator

LENGTHS = ((0, 5), (9, 37), (50, 16), (70, 60), (140, 2), (150, 33))  # of the prompts: where each begins, and its tokens


def prompts(tokens: Sequence[int]) -> list[list[int]]:
    """Six prompts out of these tokens."""
    return [list(tokens[start : start + length]) for start, length in LENGTHS]


def together(model: Any, requests: Sequence[list[int]], caches: Callable[[], list[Any]]) -> dict[int, list[int]]:
    """The tokens of six requests, the n-th of at most 8 + n, of which three begin together, others join in prefill and in decoding, and the first is taken away."""
    generator = BatchGenerator(model, max_tokens=50, prefill_step_size=20, completion_batch_size=4, prefill_batch_size=3)
    tokens: dict[int, list[int]] = {}
    joining = {0: (0, 1, 2), 3: (3,), 5: (4,), 6: (5,)}
    step, numbers = 0, {}
    while True:
        for number in joining.get(step, ()):
            (uid,) = generator.insert([requests[number]], [8 + number], caches=[caches()])
            numbers[uid], tokens[number] = number, []
        prefilled, responses = generator.next()
        for response in responses:
            tokens[numbers[response.uid]].append(response.token)
        step += 1
        if step == 4:
            generator.remove([next(uid for uid, number in numbers.items() if number == 0)])
        if step > 6 and not prefilled and not responses:
            return tokens
