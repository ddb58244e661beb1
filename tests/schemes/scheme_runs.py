"""Running models under a scheme in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.server  # noqa: F401  (the modules to hook)
import numpy as np

from mlx_lm_hooks import disable, enable


KEPT = ("mlx_lm.models.base", "mlx_lm.models.cache")


def forget_models() -> None:
    """Have models' modules imported anew: one that another test imported before keeps mlx-lm's attention."""
    for name in [name for name in sys.modules if name.startswith("mlx_lm.models.") and name not in KEPT]:
        if hasattr(sys.modules[name], "scaled_dot_product_attention"):
            del sys.modules[name]
            vars(sys.modules["mlx_lm.models"]).pop(name.rpartition(".")[2], None)


@contextlib.contextmanager
def scheme(text: str, **settings: Any) -> Iterator[None]:
    """The plugin switched on with ``--kv-scheme``, without a RAM tier unless asked for."""
    forget_models()
    enable("tiered", kv_scheme=text, **{"prompt_cache_bytes": 0, **settings})
    try:
        yield
    finally:
        disable()


def loaded(path: Path) -> Any:
    from mlx_lm import load

    return load(str(path))[0]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 1000, tokens).tolist()


def batch(model: Any, requests: Sequence[tuple[int, list[int], int]], step: int = 32) -> list[list[int]]:
    """The tokens of requests (step at which it comes, prompt, number of tokens) in one batch."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, completion_batch_size=8, prefill_batch_size=8, prefill_step_size=step)
    answers: dict[int, list[int]] = {}
    owners: dict[int, int] = {}
    for now in range(500):
        for place, (at, tokens, count) in enumerate(requests):
            if at == now:
                (uid,) = generator.insert([tokens], [count])
                owners[uid] = place
                answers[place] = []
        for response in generator.next()[1]:
            answers[owners[response.uid]].append(response.token)
        if all(len(answers.get(place, [])) == count for place, (_, _, count) in enumerate(requests)):
            break
    generator.close()
    return [answers[place] for place in range(len(requests))]


def alone(model: Any, tokens: list[int], count: int, step: int = 32, caches: Any = None) -> list[int]:
    """The same by `generate_step`, which the server uses for requests that it does not batch."""
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(tokens), model, max_tokens=count, prefill_step_size=step, prompt_cache=caches)
    return [int(token) for token, _ in steps]
