"""Tiny random-weight fp32 models, one per structural family of mlx-lm.

The configurations are cut down until a forward pass takes milliseconds, with
windows, chunks and compressed groups small enough that a prompt of a hundred
tokens passes them. All have the vocabulary of the tokenizer in
``tests/models/tiny-llama``, so that real servers can load them.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

VOCABULARY = 1024
WINDOW = 32
TOKENIZER = Path(__file__).parent / "models" / "tiny-llama"
END_TOKENS = [0, 2]

_DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}

_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **_DENSE},
    "sliding": {
        **_DENSE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "kv-shared": {
        "model_type": "gemma3n",
        "vocab_size": VOCABULARY,
        "text_config": {
            **_DENSE,
            "model_type": "gemma3n",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _LAYERS,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 1.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
        },
    },
    "hybrid": {
        "model_type": "lfm2",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "full_attn_idxs": [1, 3],
        "rope_theta": 10000.0,
        "block_dim": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "block_multiple_of": 64,
        "max_position_embeddings": 4096,
        "conv_bias": True,
        "conv_L_cache": 3,
    },
    "recurrent": {
        "model_type": "mamba2",
        "vocab_size": VOCABULARY,
        "num_heads": 4,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
    },
    "nested": {
        "model_type": "longcat_flash",
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "hidden_size": 64,
        "ffn_hidden_size": 64,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 2,
        "zero_expert_num": 2,
        "num_layers": 2,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    },
    "chunked": {
        "model_type": "llama4",
        "text_config": {
            **_DENSE,
            "model_type": "llama4",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
    },
    "moe": {
        **_DENSE,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "parallel-hybrid": {
        **_DENSE,
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "compressed": {
        "model_type": "deepseek_v41",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": [0, 2, 2, 2, 1, 1],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4, 5],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 3,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
    },
}
FAMILIES = list(CONFIGS)

# Chosen so that over a continuation of 32 tokens the best one leads by 0.01 or
# more, a thousand times what rounding changes, and that the text varies.
SEEDS = {
    "dense": 0,
    "sliding": 1,
    "kv-shared": 2,
    "hybrid": 3,
    "recurrent": 7,
    "nested": 6,
    "chunked": 2,
    "moe": 1,
    "parallel-hybrid": 10,
    "compressed": 0,
}


# The same with heads of as many dimensions as TurboQuant is for. They are no families of their own.
for _name, _family, _dim in (
    ("dense64", "dense", 64), ("dense128", "dense", 128), ("dense256", "dense", 256), ("sliding64", "sliding", 64), ("kv-shared64", "kv-shared", 64), ("chunked64", "chunked", 64)
):  # fmt: skip
    _config = CONFIGS[_family]
    CONFIGS[_name] = _config | ({"text_config": _config["text_config"] | {"head_dim": _dim}} if "text_config" in _config else {"head_dim": _dim})
    SEEDS[_name] = SEEDS[_family]


def build(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The family's model, the same in every process, and its configuration as in ``config.json``, with `changes` to it."""
    config = json.loads(json.dumps(CONFIGS[name])) | {"eos_token_id": END_TOKENS} | changes
    return build_config(config, SEEDS[name]), config


def build_config(config: dict[str, Any], seed: int) -> nn.Module:
    """A model of random weights, the same in every process."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    _spread(model)
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread(model: nn.Module) -> None:
    """Scale the matrices up, so that tokens depend on their context and the best
    one leads by far more than rounding."""
    matrices = [(path, p) for path, p in tree_flatten(model.parameters()) if p.ndim >= 2 and path.endswith("weight")]
    # Not embeddings: where they are the output matrix too, every token would repeat itself.
    scaled = [(path, p * 2.0) for path, p in matrices if "embed" not in path and "conv" not in path]
    model.load_weights(scaled, strict=False)


def write_model_dir(name: str, path: Path, **changes: Any) -> Path:
    """Write the family's model as a directory that ``mlx_lm.load`` takes, and return `path`."""
    model, config = build(name, **changes)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / file, path / file)
    return path
