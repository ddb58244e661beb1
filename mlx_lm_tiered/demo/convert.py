"""A GGUF file of a Llama model with a byte-level BPE tokenizer, as a directory that mlx-lm loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from . import gguf

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# llama.cpp's name of a pre-tokenizer -> how to build it.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def convert(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Write `target` (made if need be): float32 weights, config, tokenizer. Raises gguf.GGUFError."""
    meta, tensors = gguf.read(source)
    architecture, pre = meta["general.architecture"], meta.get("tokenizer.ggml.pre")
    if architecture != "llama":
        raise gguf.GGUFError(f"{source} holds a model of the architecture {architecture!r}; only llama is converted")
    if meta["tokenizer.ggml.model"] != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise gguf.GGUFError(f"{source} has the tokenizer {pre!r}; {', '.join(_PRE_TOKENIZERS)} are converted")
    directory = Path(target)
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(meta, tied="output.weight" not in tensors)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(directory / "tokenizer.json"))
    save_file(_weights(meta, tensors), str(directory / "model.safetensors"), {"format": "mlx"})


def _weights(meta: dict[str, Any], tensors: dict[str, gguf.Tensor]) -> dict[str, np.ndarray]:
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        array = tensor.load()
        if stem.startswith("blk."):
            _, layer, kind = stem.split(".")
            if kind in heads:
                array = _unpermute(array, heads[kind])
            target = f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
        else:
            target = _TOP_NAMES[stem]
        weights[f"{target}.weight"] = np.ascontiguousarray(array)
    return weights


def _unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp's converter gives to q_proj and k_proj: (rows, columns) each."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": meta["llama.embedding_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[meta["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in kinds
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    def special(name: str) -> str:
        return meta["tokenizer.ggml.tokens"][meta[f"tokenizer.ggml.{name}_token_id"]]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos"),
        "eos_token": special("eos"),
        "unk_token": special("unknown"),
        "pad_token": special("padding"),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
