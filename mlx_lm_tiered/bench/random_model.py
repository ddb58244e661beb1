"""Write a model of random weights in a real model's shape, for measuring on a machine that has no real one.

    python -m mlx_lm_tiered.bench.random_model OUT_DIR --tokenizer DIR [--layers 32] [--hidden 4096] ...

The defaults are the attention and feed-forward shapes of an 8B Llama in bf16. The
vocabulary is the tokenizer's, so the head is smaller than the real one's. What it
says is noise; what it costs is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")


def write(out: Path, tokenizer: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, feed_forward: int, seed: int = 0) -> None:
    """Write the directory: one safetensors file a layer, bf16, normal weights of deviation 1/sqrt(inputs)."""
    out.mkdir(parents=True)
    like = json.loads((tokenizer / "config.json").read_text())
    vocabulary = like["vocab_size"]
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out)
    mx.random.seed(seed)

    def dense(rows: int, columns: int) -> mx.array:
        return (mx.random.normal((rows, columns), dtype=mx.float32) * columns**-0.5).astype(mx.bfloat16)

    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (feed_forward, hidden), "mlp.up_proj": (feed_forward, hidden), "mlp.down_proj": (hidden, feed_forward),
        }  # fmt: skip
        weights = {f"model.layers.{layer}.{name}.weight": dense(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = mx.ones(hidden, mx.bfloat16)
        mx.save_safetensors(str(out / f"model-{layer:03}.safetensors"), weights)
    rest = {"model.embed_tokens.weight": dense(vocabulary, hidden), "lm_head.weight": dense(vocabulary, hidden)}
    mx.save_safetensors(str(out / "model-rest.safetensors"), rest | {"model.norm.weight": mx.ones(hidden, mx.bfloat16)})
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": feed_forward,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "eos_token_id": like["eos_token_id"],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model directory whose tokenizer and vocabulary to use")
    for name, default in (("layers", 32), ("hidden", 4096), ("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("feed-forward", 14336)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = vars(parser.parse_args())
    write(args.pop("out"), args.pop("tokenizer"), **args)


if __name__ == "__main__":
    main()
