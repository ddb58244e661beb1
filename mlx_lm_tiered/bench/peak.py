"""The peak memory of a long prefill under KV schemes, against the peak without one.

A Llama of random weights, in memory: few layers, so that a long prompt ends within
minutes on a CPU, with heads of a real model's size, because what a prefill takes
beside its caches is one layer's attention. mlx-lm's own prefill runs it, chunk by chunk,
each scheme from an allocator that keeps nothing. float32 on a CPU, bfloat16 elsewhere.
``peak_ratio`` is a scheme's peak over that of full precision; above 1 the scheme
costs memory that it should save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.spec import Spec

from .in_process import CHUNK, named, scheme
from .schemes import Runner

VOCABULARY, HIDDEN = 512, 256


def run(
    tokens: int = 32768, schemes: Sequence[str] | None = None, *, layers: int = 2, heads: int = 4, head_dim: int = 64
) -> dict[str, Any]:
    """One row a scheme, bytes beside the weights. Without `schemes`: 8 and 4 bits, and 4 bits from the middle of the prompt on. Raises ValueError."""
    asked = named(["bf16", *(schemes or ("affine:8", "affine:4", f"affine:4@{tokens // 2}"))])
    if heads % 2:
        raise ValueError(f"{heads} heads are not two to a KV head")
    kv_heads = heads // 2
    model = _model(asked[-1][1], layers, heads, kv_heads, head_dim)
    prompt = [7 * place % VOCABULARY for place in range(tokens)]
    rows: list[dict[str, Any]] = []
    for name, spec in asked:
        runner = Runner(model, spec)
        with Progress(name):
            found = runner.prefill(prompt)
        kv = sum(cache.nbytes for cache in runner.caches)
        if not spec.plain and not all(getattr(cache, "bits", 0) for cache in runner.caches):
            raise ValueError(f"{name} has quantized nothing: a prompt of {tokens} tokens does not reach its start, or the heads cannot be grouped")
        peak = found["prefill_peak_bytes"]
        first = rows[0]["prefill_peak_bytes"] if rows else peak
        rows.append({"scheme": name, "kv_bytes": kv, **found, "peak_ratio": peak / first})
        del runner
    size = model.model.embed_tokens.weight.dtype.size
    return {
        "bench": "peak",
        "tokens": tokens,
        "chunk": CHUNK,
        "shape": f"{layers} layers, {heads}/{kv_heads} heads of {head_dim}",
        "all_scores_of_a_chunk_bytes": heads * min(CHUNK, tokens) * tokens * size,
        "peak_ratio_max": max(row["peak_ratio"] for row in rows[1:]),
        "rows": rows,
    }


def _model(spec: Spec, layers: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    with scheme(spec):
        # Its module must be imported with the scheme on.
        from mlx_lm.models import llama

        shape = llama.ModelArgs(
            model_type="llama", hidden_size=HIDDEN, num_hidden_layers=layers, intermediate_size=2 * HIDDEN, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, vocab_size=VOCABULARY, tie_word_embeddings=True,
        )  # fmt: skip
        mx.random.seed(0)
        model = llama.Model(shape)
    kind = mx.float32 if mx.default_device().type == mx.cpu else mx.bfloat16
    model.update(tree_map(lambda array: array.astype(kind), model.parameters()))
    mx.eval(model.parameters())
    return model
