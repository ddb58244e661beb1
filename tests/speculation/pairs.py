"""The tiny pairs of Gemma 4 targets and assistants of the golden file: weights by seeds, in float32.

Targets like E4B (per-layer inputs, and layers at the end that share keys and values)
and like 12B (in full layers the keys are the values). Assistants of random weights, and
"echo" ones that are right fairly often: they repeat the target's own hidden state with some noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import assistants
import mlx.core as mx
import numpy as np
from assistants import LAYERS, ROPE, V, WINDOW
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4, gemma4_text

E4B: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 48, "num_hidden_layers": 8, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "global_head_dim": 32, "global_partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "vocab_size": V, "vocab_size_per_layer_input": V,
    "num_key_value_heads": 2, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8, "sliding_window": WINDOW, "sliding_window_pattern": 4,
    "max_position_embeddings": 4096, "attention_k_eq_v": False, "final_logit_softcapping": 30.0, "use_double_wide_mlp": True,
    "rope_parameters": ROPE, "tie_word_embeddings": True,
}  # fmt: skip
U12B = E4B | {
    "num_hidden_layers": 6, "sliding_window_pattern": 3, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False, "attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
}  # fmt: skip
# Heads that can be cut into groups.
WIDE = E4B | {"head_dim": 32, "global_head_dim": 64}
# By the golden file's names: what the layers are like, and whether mlx-lm's class for models that also see is around them.
TARGETS = {"e4b": (E4B, True), "u12b": (U12B, True), "e4b_textonly": (E4B, False), "wide": (WIDE, True)}


def target(name: str, seed: int = 11) -> Any:
    """The model of that name."""
    config, wrapped = TARGETS[name]
    if wrapped:
        model = gemma4.Model(gemma4.ModelArgs(text_config=dict(config), vocab_size=V))
    else:
        model = gemma4_text.Model(gemma4_text.ModelArgs(**config))
    rng = np.random.default_rng(seed)
    weights = []
    for place, array in sorted(tree_flatten(model.parameters())):  # whatever order the members are made in
        if place.endswith("layer_scalar"):
            made = np.full(array.shape, 0.9)
        elif "norm" in place:
            made = rng.uniform(0.6, 1.4, array.shape)
        else:
            gain = 1.0 if "embed_tokens" in place else 1.6
            made = rng.normal(0, gain * array.shape[-1] ** -0.5, array.shape)
        weights.append((place, mx.array(made.astype(np.float32))))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def write_assistant(directory: Path, name: str, head: str, kind: str, model: Any, seed: int = 5, noise: float = 0.25) -> Path:
    """The assistant with a `head` ("centroid" or "tied") of a `kind` ("random" or "echo") for the target of that name, which is `model`."""
    config = TARGETS[name][0]
    hidden = config["hidden_size"]
    width = hidden if kind == "echo" else assistants.D
    rng = np.random.default_rng(seed)
    made = assistants.layers(rng, width, hidden, {"sliding_attention": config["head_dim"], "full_attention": config["global_head_dim"]})
    if kind == "echo":
        text = getattr(model, "language_model", model)
        same = np.eye(hidden, dtype=np.float32)
        made["model.embed_tokens.weight"] = np.array(text.model.embed_tokens.weight)
        made["pre_projection.weight"] = np.concatenate([0.35 * same, 1.0 * same], 1) + noise * assistants.matrix(rng, width, 2 * hidden)
        made["post_projection.weight"] = same.copy()
        made["model.norm.weight"] = np.ones((width,), np.float32)
        for at in range(len(LAYERS)):
            layer = f"model.layers.{at}."
            made[layer + "post_attention_layernorm.weight"] *= noise
            made[layer + "post_feedforward_layernorm.weight"] *= noise
            made[layer + "layer_scalar"] = np.ones((1,), np.float32)
    if head == "centroid":
        made |= assistants.centroid_head(rng, width)
    unified = head != "centroid"
    settings = {
        "architectures": ["Gemma4UnifiedAssistantForCausalLM" if unified else "Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": hidden, "num_centroids": assistants.CENTROIDS, "centroid_intermediate_top_k": assistants.TOP, "use_ordered_embeddings": not unified,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": width, "intermediate_size": assistants.MLP, "num_hidden_layers": len(LAYERS),
            "num_attention_heads": assistants.HEADS, "num_key_value_heads": config["num_key_value_heads"],
            "num_global_key_value_heads": config.get("num_global_key_value_heads"), "head_dim": config["head_dim"],
            "global_head_dim": config["global_head_dim"], "rms_norm_eps": 1e-6, "layer_types": LAYERS,
            "sliding_window": config["sliding_window"], "max_position_embeddings": 4096, "vocab_size": V,
            "num_kv_shared_layers": len(LAYERS), "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": config["attention_k_eq_v"], "rope_parameters": ROPE, "final_logit_softcapping": None,
        },
    }  # fmt: skip
    return assistants.write(directory, settings, made)


def cases() -> Iterator[tuple[str, str, str]]:
    """Target, head and kind of the golden file's runs, in its order."""
    for name in ("e4b", "u12b", "e4b_textonly"):
        for head in ("centroid", "tied"):
            for kind in ("random", "echo"):
                if name != "e4b_textonly" or (head, kind) == ("tied", "echo"):
                    yield name, head, kind
