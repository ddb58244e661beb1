"""A model that says what it is told to: a real mlx-lm model directory whose next token depends on the last one alone.

Attention and feed-forward weights are zero, so the last token's embedding, one-hot,
reaches the head, which maps it to its successor. Texts that a reply needs whole are
single added tokens. For tests of what a server does around a reply, such as tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from .models import TINY

END = 2  # <|im_end|>
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.tool_calls %}{% for tool_call in m.tool_calls %}"
    "{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
    "{{ '<tool_call>' + tool_call.name + '</tool_call>' }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<|after_tool|>' if messages[-1]['role'] == 'tool' else '<|after_user|>' }}{% endif %}"
)


def write(path: Path, replies: dict[str, Sequence[str]]) -> Path:
    """Write a model that answers ``<|after_user|>`` and ``<|after_tool|>`` with these texts, each text one token."""
    path.mkdir(parents=True)
    tokenizer = json.loads((TINY["llama"] / "tokenizer.json").read_text())
    texts = list(dict.fromkeys([*replies, *(text for reply in replies.values() for text in reply)]))
    ids = {text: 1024 + i for i, text in enumerate(texts)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": ids[text], "content": text, **flags} for text in texts]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((TINY["llama"] / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))

    size = -(-(1024 + len(texts)) // 64) * 64
    follow = {id: END for id in range(size)}
    for start, reply in replies.items():
        chain = [ids[start], *(ids[text] for text in reply), END]
        follow |= dict(zip(chain, chain[1:], strict=False))
    head = mx.zeros((size, size))
    head[mx.array(list(follow.values())), mx.array(list(follow))] = 1.0
    layer = {
        "self_attn.q_proj": (size, size), "self_attn.k_proj": (64, size), "self_attn.v_proj": (64, size),
        "self_attn.o_proj": (size, size), "mlp.gate_proj": (64, size), "mlp.up_proj": (64, size), "mlp.down_proj": (size, 64),
    }  # fmt: skip
    weights = {f"model.layers.0.{name}.weight": mx.zeros(shape) for name, shape in layer.items()}
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[f"model.{name}.weight"] = mx.ones(size)
    weights |= {"model.embed_tokens.weight": mx.eye(size), "lm_head.weight": head}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    shape = {
        "model_type": "llama", "hidden_size": size, "num_hidden_layers": 1, "intermediate_size": 64,
        "num_attention_heads": size // 64, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-5, "vocab_size": size,
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "eos_token_id": [0, END],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(shape))
    shutil.copystat(TINY["llama"], path)
    return path
