"""Decode steps of a model of random weights in memory, over caches of random contents: no weights on disk, no prefill.

The defaults are an 8B Llama's shape in bf16. Steps are taken as mlx-lm's
`generate_step` takes them, the next one queued before the last one's token is read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import base, llama

from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.schemes.attention import build, caches_use
from mlx_lm_tiered.schemes.spec import parse

from .kernels import DIM, HEADS, KV_HEADS, SCHEMES, filled

STEPS, ROUNDS = 16, 5
VOCABULARY = 32000


def run(contexts: Sequence[int] = (16384, 65536), schemes: Sequence[str] = SCHEMES, layers: int = 32, hidden: int = 4096) -> Any:
    """One row a context and scheme, over caches of one sequence and as the one row of a batch, which a server has: milliseconds a token, medians over rounds in which the schemes take turns; and `failed`, kernels that are off."""
    model = random_llama(layers, hidden)
    warnings: list[str] = []
    kernels = Kernels("auto", warnings.append)
    upstream = base.quantized_scaled_dot_product_attention
    base.quantized_scaled_dot_product_attention = build(upstream, kernels)
    caches_use(kernels)
    try:
        rows = []
        for tokens, batch in itertools.product(contexts, (False, True)):
            runners = {name: _Runner(model, tokens, name, layers, batch) for name in schemes}
            times: dict[str, list[float]] = {name: [] for name in schemes}
            for runner in runners.values():
                runner.steps(4)
            for number in range(ROUNDS):
                for place in range(len(schemes)):
                    name = schemes[(place + number) % len(schemes)]
                    times[name].append(runners[name].steps(STEPS))
            rows += [{"tokens": tokens, "batch": batch, "scheme": name, "ms_per_token": median(times[name]) * 1e3, "ratio_to_first": _ratio(times, name)} for name in schemes]
            del runners
            mx.clear_cache()
        return {"rows": rows, "failed": kernels.failed, "warnings": warnings}
    finally:
        base.quantized_scaled_dot_product_attention = upstream
        caches_use(Kernels("off"))


def _ratio(times: dict[str, list[float]], name: str) -> float:
    first = next(iter(times.values()))
    return median(a / b for a, b in zip(first, times[name], strict=True))


def random_llama(layers: int, hidden: int) -> Any:
    """A Llama of random weights in bf16, with the attention of an 8B one."""
    shape = llama.ModelArgs(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 7 // 2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5, vocab_size=VOCABULARY, rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = llama.Model(shape)
    model.update(tree_map(lambda p: (mx.random.normal(p.shape) * p.shape[-1] ** -0.5).astype(mx.bfloat16), model.parameters()))
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


class _Runner:
    """A sequence under one scheme."""

    def __init__(self, model: Any, tokens: int, scheme: str, layers: int, batch: bool):
        form = parse(scheme).form
        self._model = model
        self._caches = []
        for _ in range(layers):
            cache = filled(tokens, form)
            self._caches.append(cache.merge([cache]) if batch else cache)
            # One layer's copy at a time.
            mx.eval(self._caches[-1].state)
        self._next = mx.array([[1]])

    def steps(self, count: int) -> float:
        """Seconds a step."""
        queued = self._step(self._next)
        mx.eval(queued)
        started = time.perf_counter()
        for _ in range(count):
            following = self._step(queued)
            mx.eval(queued)
            queued = following
        mx.eval(queued)
        self._next = queued
        return (time.perf_counter() - started) / count

    def _step(self, token: mx.array) -> mx.array:
        chosen = mx.argmax(self._model(token, cache=self._caches)[:, -1:], axis=-1)
        mx.async_eval(chosen)
        return chosen
