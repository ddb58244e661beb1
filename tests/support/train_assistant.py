#!/usr/bin/env python3
"""Train an assistant for the tiny Gemma 4, for tests and for `bench speculative`.

    train_assistant.py TARGET_DIR OUT_DIR [--seconds 240] [--hidden-size 64] [--text DIR]

Writes an artifact as Gemma 4's assistants are. The text is that of `train_tiny.py`. The
target stays as it is: the assistant learns its distributions, from its hidden states
and over its keys and values, four drafts deep, each round's at the position of the
first as they are drafted by default.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("", "hooks", "patches")] + [str(Path(__file__).parents[1])]

from support.train_tiny import documents

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_tiered.speculation.assistant import config as configuration
from mlx_lm_tiered.speculation.assistant.model import AssistantModel

DEEP = 4  # drafts of a round
LAYERS = ["sliding_attention", "full_attention"]


def description(target: Any, hidden: int) -> dict[str, Any]:
    """The artifact's config.json."""
    args = target.args
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": args.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": len(LAYERS), "num_attention_heads": args.num_attention_heads,
            "num_key_value_heads": args.num_key_value_heads, "head_dim": args.head_dim, "global_head_dim": args.global_head_dim,
            "rms_norm_eps": args.rms_norm_eps, "layer_types": LAYERS, "sliding_window": args.sliding_window,
            "max_position_embeddings": args.max_position_embeddings, "vocab_size": args.vocab_size, "num_kv_shared_layers": len(LAYERS),
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "attention_k_eq_v": False, "rope_parameters": args.rope_parameters,
        },
    }  # fmt: skip


def seen(target: Any, batch: mx.array) -> tuple[mx.array, mx.array, dict[str, tuple[mx.array, mx.array]]]:
    """Of sequences (rows, tokens): hidden states, log-probabilities, and keys and values of the layers that an assistant reads."""
    caches = make_prompt_cache(target)
    hidden = target.model(batch, cache=caches)
    logits = target.model.embed_tokens.as_linear(hidden)
    logits = mx.tanh(logits / target.final_logit_softcapping) * target.final_logit_softcapping
    own = target.args.num_hidden_layers - target.args.num_kv_shared_layers
    donors = {kind: at for at, kind in enumerate(target.args.layer_types[:own])}
    count = batch.shape[1]
    # A ring keeps all of its first chunk until the next comes.
    read = {kind: (caches[at].keys[:, :, :count], caches[at].values[:, :, :count]) for kind, at in donors.items()}
    found = hidden, logits - mx.logsumexp(logits, axis=-1, keepdims=True), read
    mx.eval(found)
    return found


def loss_of(model: AssistantModel, embedded: mx.array, hidden: mx.array, logprobs: mx.array, read: dict[str, Any], masks: dict[str, mx.array]) -> mx.array:
    """Mean cross entropy with the target's distributions, over all starts and depths."""
    count = embedded.shape[1]
    starts = count - DEEP  # the pending tokens of a round each: 1, 2, ...
    state, total = hidden[:, :starts], mx.array(0.0)
    for depth in range(DEEP):
        h = model.pre_projection(mx.concatenate([embedded[:, 1 + depth : 1 + depth + starts], state], axis=-1))
        for layer in model.model.layers:
            keys, values = (side[:, :, :starts] for side in read[layer.layer_type])
            h, _, _ = layer(h, masks[layer.layer_type][:starts, :starts], None, shared_kv=(keys, values), offset=1)
        h = model.model.norm(h)
        logits = model.model.embed_tokens.as_linear(h)
        wanted = mx.exp(logprobs[:, 1 + depth : 1 + depth + starts])
        total = total - (wanted * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(-1).mean()
        state = model.post_projection(h)
    return total / DEEP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--text", type=Path, metavar="DIR", help="as for the target")
    options = parser.parse_args()
    mx.random.seed(0)
    target, tokenizer = load(str(options.target))
    text = "\n\n".join(documents(options.text))
    tokens = mx.array(tokenizer.encode(text))
    told = description(target, options.hidden_size)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(json.dumps(told, indent=2) + "\n")
    (options.out / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": 2}) + "\n")
    model = AssistantModel(configuration.read(options.out), centroid_head=False)
    model.model.embed_tokens.weight = mx.random.normal(model.model.embed_tokens.weight.shape) * 0.05
    optimizer = optim.AdamW(learning_rate=options.rate, betas=[0.9, 0.98], weight_decay=0.05, bias_correction=True)
    step_of = nn.value_and_grad(model, loss_of)
    places = mx.arange(options.length)
    causal = places[None] <= places[:, None]
    masks = {"full_attention": causal, "sliding_attention": causal & (places[None] > places[:, None] - target.args.sliding_window)}
    rng = random.Random(0)
    began = reported = time.monotonic()
    steps = 0
    while (done := (time.monotonic() - began) / options.seconds) < 1:
        optimizer.learning_rate = options.rate * min(1.0, (steps + 1) / 30) * (0.02 + 0.98 * (1 - done))
        places_of = [rng.randrange(tokens.size - options.length) for _ in range(options.batch)]
        batch = mx.stack([tokens[at : at + options.length] for at in places_of])
        hidden, logprobs, read = seen(target, batch)
        embedded = target.model.embed_tokens(batch) * target.model.embed_scale
        loss, grads = step_of(model, embedded, hidden, logprobs, read, masks)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        steps += 1
        if time.monotonic() - reported > 15:
            reported = time.monotonic()
            print(f"{steps} steps, loss {loss.item():.3f}", flush=True)
    mx.save_safetensors(str(options.out / "model.safetensors"), dict(tree_flatten(model.parameters())))
    print(f"{steps} steps; wrote {options.out}")


if __name__ == "__main__":
    main()
