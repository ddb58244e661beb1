"""Tiny Gemma 4 assistants of random weights, as directories, and keys and values for them to borrow. NumPy only: what makes the golden file imports this, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

V, H, D, HEADS, MLP, WINDOW, CENTROIDS, TOP = 64, 48, 32, 4, 40, 16, 8, 2
HEAD_DIM = {"sliding_attention": 16, "full_attention": 32}
LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Of each kind that there is: whether it has the centroid head, and what its target's layers are like.
KINDS = {"centroid": False, "tied": False, "unified": True, "centroid-k-eq-v": True}
# Tokens of the golden files' prompts, and how much of sliding layers an assistant is given: the newest window, or all of it.
LENGTHS = (5, 40, 200, 600)
FORMS = ("cut", "whole")


def config(kind: str, **text: Any) -> dict[str, Any]:
    """A config.json. `unified` declares centroids that its weights do not have."""
    k_eq_v, centroid = KINDS[kind], kind.startswith("centroid")
    return {
        "architectures": ["Gemma4UnifiedAssistantForCausalLM" if kind == "unified" else "Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if kind == "unified" else "gemma4_assistant",
        "backbone_hidden_size": H,
        "use_ordered_embeddings": centroid,
        "num_centroids": CENTROIDS,
        "centroid_intermediate_top_k": TOP,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_unified_text" if kind == "unified" else "gemma4_text",
            "hidden_size": D,
            "intermediate_size": MLP,
            "num_hidden_layers": len(LAYERS),
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1 if k_eq_v else None,
            "attention_k_eq_v": k_eq_v,
            "head_dim": HEAD_DIM["sliding_attention"],
            "global_head_dim": HEAD_DIM["full_attention"],
            "layer_types": LAYERS,
            "sliding_window": WINDOW,
            "max_position_embeddings": 4096,
            "vocab_size": V,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": len(LAYERS),
            "hidden_size_per_layer_input": 0,
            "rope_parameters": ROPE,
            "rms_norm_eps": 1e-6,
            **text,
        },
    }


def tensors(kind: str, seed: int = 5) -> dict[str, np.ndarray]:
    """Weights in float32, by name."""
    rng = np.random.default_rng(seed)
    made = layers(rng, D, H, HEAD_DIM)
    return made | centroid_head(rng, D) if kind.startswith("centroid") else made


def layers(rng: np.random.Generator, width: int, hidden: int, dims: Mapping[str, int]) -> dict[str, np.ndarray]:
    """All but a centroid head, of an assistant so wide for a target of a hidden size; `dims` are the heads' by layer type."""
    made = {
        "model.embed_tokens.weight": matrix(rng, V, width),
        "model.norm.weight": norm(rng, width),
        "pre_projection.weight": matrix(rng, width, 2 * hidden),
        "post_projection.weight": matrix(rng, hidden, width),
    }
    for place, name in enumerate(LAYERS):
        layer, dim = f"model.layers.{place}", dims[name]
        made |= {
            f"{layer}.self_attn.q_proj.weight": matrix(rng, HEADS * dim, width),
            f"{layer}.self_attn.o_proj.weight": matrix(rng, width, HEADS * dim),
            f"{layer}.self_attn.q_norm.weight": norm(rng, dim),
            f"{layer}.mlp.gate_proj.weight": matrix(rng, MLP, width),
            f"{layer}.mlp.up_proj.weight": matrix(rng, MLP, width),
            f"{layer}.mlp.down_proj.weight": matrix(rng, width, MLP),
            f"{layer}.layer_scalar": np.full(1, 0.9, np.float32),
        }
        for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            made[f"{layer}.{part}_layernorm.weight"] = norm(rng, width)
    return made


def centroid_head(rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    return {
        "masked_embedding.centroids.weight": matrix(rng, CENTROIDS, width),
        "masked_embedding.token_ordering": rng.permutation(V).astype(np.int64),
    }


def matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)


def norm(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.uniform(0.6, 1.4, length).astype(np.float32)


def write(directory: Path, settings: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """An artifact of one file of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(weights, str(directory / "model.safetensors"))
    return directory


def borrowed(kind: str, tokens: int, seed: int = 6) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Keys and values (1, KV heads, tokens, head dimension) by layer type, as large as a norm makes them."""
    rng = np.random.default_rng(seed)
    heads = {"sliding_attention": 2, "full_attention": 1 if KINDS[kind] else 2}
    made = {}
    for name, count in heads.items():
        keys, values = (rng.normal(size=(1, count, tokens, HEAD_DIM[name])).astype(np.float32) for _ in range(2))
        made[name] = keys, values
    return made


def read(kind: str, tokens: int, form: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What `borrowed` has, in one of `FORMS`."""
    whole = borrowed(kind, tokens)
    if form == "cut":
        whole["sliding_attention"] = tuple(side[:, :, -WINDOW:] for side in whole["sliding_attention"])
    return whole


def inputs(seed: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A scaled embedding and a hidden state (1, 1, H), and another embedding for the draft behind it."""
    rng = np.random.default_rng(seed)
    first, hidden, second = (rng.normal(size=(1, 1, H)).astype(np.float32) for _ in range(3))
    return first, hidden, second
