"""A model of random weights that loads in a moment, for measurements that are not about the model.

What it says is noise, but each token depends on all before it, and the best one
leads by far more than rounding changes: a wrong byte in a cache shows in the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 3, 64, 4, 2, 16, 128
END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(out: Path, seed: int = 0, *, pipelines: bool = False) -> Path:
    """Write it as a directory that mlx-lm loads: a Llama in float32 whose tokens are bytes; with `pipelines` a Qwen 2, which ranks can divide by layers, too. Returns `out`."""
    out.mkdir(parents=True)
    vocabulary = _write_tokenizer(out)
    mx.random.seed(seed)

    def dense(rows: int, columns: int) -> mx.array:
        return mx.random.normal((rows, columns)) * (2.0 * columns**-0.5)

    weights = {"model.embed_tokens.weight": dense(vocabulary, HIDDEN), "lm_head.weight": dense(vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN), "mlp.up_proj": (FEED_FORWARD, HIDDEN), "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }  # fmt: skip
        weights |= {f"model.layers.{layer}.{name}.weight": dense(*shape) for name, shape in shapes.items()}
        weights |= {f"model.layers.{layer}.{name}.weight": mx.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        if pipelines:
            biased = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
            weights |= {f"model.layers.{layer}.self_attn.{name}.bias": mx.random.normal((size,)) for name, size in biased.items()}
    weights["model.norm.weight"] = mx.ones(HIDDEN)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}))
    config = {
        "model_type": "qwen2" if pipelines else "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary, "max_position_embeddings": 32768, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "eos_token_id": [0],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def _write_tokenizer(out: Path) -> int:
    """A tokenizer with a token for each byte and three special ones; returns the size of its vocabulary."""
    names = [END, START_TURN, END_TURN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
            "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
        })
    )  # fmt: skip
    return len(names)
