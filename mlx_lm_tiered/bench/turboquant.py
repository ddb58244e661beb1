"""TurboQuant beside other KV schemes: a model's logits, bytes of a token, tokens in the same bytes, and attention over random content.

One row a scheme. ``kl`` and ``top1`` are the model's (`quality.py`), and so is
``model_bytes_per_token_per_head``, the mean over its caches of keys and values in its
own precision and with its own heads, rings included, measured from their arrays.

The rest is of caches of one KV head of `DIM` dimensions with random content in bf16,
so that it is the same for every model. ``bytes_per_token_per_head`` is what the arrays
of a cache take that is exactly full; ``tokens`` how many fit into the bytes of
`context` tokens in bf16, found by filling a cache piece by piece; ``context_ratio`` is
their ratio. ``cosine`` and ``rel_l2`` compare the attention of `QUERIES` queries over
`KEYS` tokens with that in fp32 over the same numbers: on independent values nothing
averages out, and a text's attention is nearer.

With a decode kernel ``attention`` has rows of the attention of one step
(`bench/kernels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_lm_tiered.kernels.choice import available
from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.convert import fresh, leaves
from mlx_lm_tiered.schemes.spec import PLAIN, Spec

from . import kernels
from .in_process import loaded, named, planned, scheme
from .quality import Quality

SCHEMES = ("bf16", "affine:8", "affine:4", "turbo:k8v8", "turbo:k8v4", "turbo:k8v3", "turbo:k8v2", "turbo:k5v3", "turbo:k4v3")
DIM, KEYS, QUERIES = 128, 4096, 64
CONTEXTS = (16384, 65536, 131072)
# Tokens by which mlx-lm's caches grow: one that holds a multiple has no room beside.
STEP = 256


def run(model_path: Path, schemes: Sequence[str] = SCHEMES, text_tokens: int = 512, context: int = 16384) -> dict[str, Any]:
    """Measure it. Raises ValueError for a scheme that the model cannot have, and for one that differs by layer."""
    asked = named(schemes)
    if by_layer := [name for name, spec in asked if spec.config]:
        raise ValueError(f"{by_layer[0]} is a scheme for each layer; a token of it has no one size")
    context = -(-context // STEP) * STEP
    model, tokenizer = loaded(model_path, [spec for _, spec in asked])
    for _, spec in asked:
        planned(model, spec, model_path)
    quality = Quality(model, tokenizer, [spec for _, spec in asked], text_tokens)
    plain = _empty(PLAIN)
    plain.update_and_fetch(*_random(context))
    rows = []
    for name, spec in asked:
        with Progress(name):
            found, caches = quality.of(spec)
            row = {"scheme": name, **found, **capacity(spec, plain.nbytes, context), **attention_error(spec)}
            rows.append(row | {"model_bytes_per_token_per_head": bytes_per_token_per_head(caches)})
    result = {"bench": "turboquant", "model": model_path.name, "text_tokens": len(quality.text), "head_dim": DIM, "context": context, "rows": rows}
    if available():
        result["attention"] = kernels.run(CONTEXTS, [name for name, _ in asked])
    return result


def bytes_per_token_per_head(caches: Sequence[Any]) -> float:
    """The mean over caches of keys and values, of their arrays' bytes by slots and KV heads."""
    return mean(sum(array.nbytes / array.shape[2] / array.shape[1] for array in arrays) for cache in leaves(caches) if (arrays := _arrays(cache)))


def _arrays(cache: Any) -> list[mx.array]:
    sides = [side for side in (getattr(cache, "keys", None), getattr(cache, "values", None)) if side is not None]
    return [array for side in sides for array in (side if isinstance(side, tuple) else (side,))]


def capacity(spec: Spec, room: int, context: int) -> dict[str, float]:
    """What a token takes, and how many fit into `room` bytes, which are those of `context` tokens in bf16."""
    cache, tokens, full = _empty(spec), 0, 0
    while cache.nbytes <= room:
        tokens, full = cache.offset, cache.nbytes
        mx.eval(cache.update_and_fetch(*_random(STEP)))
    each = full / tokens
    return {"bytes_per_token_per_head": each, "ratio_to_bf16": room / context / each, "tokens": tokens, "context_ratio": tokens / context}


def attention_error(spec: Spec) -> dict[str, float]:
    """Of attention over a cache of the scheme from that in fp32: `cosine` of the outputs, `rel_l2` of their difference."""
    queries, keys, values = (mx.random.normal((1, 1, n, DIM), key=mx.random.key(seed)).astype(mx.bfloat16) for seed, n in enumerate((QUERIES, KEYS, KEYS)))
    exact = mx.fast.scaled_dot_product_attention(*(array.astype(mx.float32) for array in (queries, keys, values)), scale=DIM**-0.5)
    with scheme(spec):
        cache = _empty(spec)
        held = cache.update_and_fetch(keys, values)
        found = base.scaled_dot_product_attention(queries, *held, cache=cache, scale=DIM**-0.5, mask=None).astype(mx.float32)
        mx.eval(found)
    cosine = (found * exact).sum() / (_norm(found) * _norm(exact))
    return {"cosine": cosine.item(), "rel_l2": (_norm(found - exact) / _norm(exact)).item()}


def _empty(spec: Spec) -> Any:
    return KVCache() if spec.form is None else fresh(KVCache(), spec.form)


def _random(tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, 1, tokens, DIM)).astype(mx.bfloat16) for _ in range(2))
    return keys, values


def _norm(array: mx.array) -> mx.array:
    return mx.linalg.norm(array.flatten())
