"""The structural families whose caches can be quantized, with heads of 32: whole groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from families import CONFIGS, TOKENIZER, WINDOW, build_config

_GEMMA_4 = json.loads((TOKENIZER.parent / "tiny-gemma4_text" / "config.json").read_text())
_GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 1024, "rms_norm_eps": 1e-5,
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW,
    "rope_theta": 10000, "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"rope_type": "default"},
}  # fmt: skip

WIDE: dict[str, dict[str, Any]] = {
    "dense": CONFIGS["dense"] | {"head_dim": 32},
    "moe": CONFIGS["moe"] | {"head_dim": 32},
    "sliding": CONFIGS["sliding"] | {"head_dim": 32},
    "kv-shared": CONFIGS["kv-shared"] | {"text_config": CONFIGS["kv-shared"]["text_config"] | {"head_dim": 32}},
    "kv-donors": _GEMMA_4 | {"sliding_window": WINDOW},
    "sinks": _GPT_OSS,
    "hybrid": CONFIGS["hybrid"] | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "parallel-hybrid": CONFIGS["parallel-hybrid"] | {"head_dim": 32},
}


def wide(name: str) -> Any:
    """The family's model. Under a scheme: one whose module was imported before keeps mlx-lm's attention."""
    return build_config(json.loads(json.dumps(WIDE[name])), seed=5)


def write(name: str, folder: Path) -> Path:
    """The family's model as a directory, so that its entries outlive the process."""
    import shutil

    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE[name] | {"eos_token_id": [0, 2]}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(wide(name).parameters())), {"format": "mlx"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / file, folder / file)
    return folder
