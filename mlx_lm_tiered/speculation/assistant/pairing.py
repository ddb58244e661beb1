"""Whether an assistant and a model belong together: the assistant reads the model's hidden states, tokens, keys and values, so their shapes must be its own."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import gemma4_text

from .model import AssistantModel


class NotAPair(ValueError):
    """The assistant is not of this model; the text is a sentence that names what differs."""


def check(assistant: AssistantModel, target_model: Any) -> None:
    """Raises NotAPair unless `target_model`, as mlx-lm has loaded it, has what the assistant reads.

    Keys and values are those of the last layer of each type that has its own; layers
    behind it that share them do not count.
    """
    text = text_model(target_model)
    config, args = assistant.config, text.args
    if args.hidden_size != config.backbone_hidden_size:
        raise NotAPair(f"the assistant is for a model with a hidden size of {config.backbone_hidden_size}; this one has {args.hidden_size}")
    if args.vocab_size != config.text.vocab_size:
        raise NotAPair(f"the assistant has a vocabulary of {config.text.vocab_size} tokens; the model has {args.vocab_size}")
    for name, heads in config.heads.items():
        layer = lending_layer(target_model, name)
        if layer is None:
            raise NotAPair(f"the assistant has layers of {name}; the model has none with keys and values of its own")
        attention = text.layers[layer].self_attn
        if attention.head_dim != heads.head_dim:
            raise NotAPair(f"the assistant's {name} layers have heads of {heads.head_dim} numbers; the model's have {attention.head_dim}")
        if attention.n_kv_heads != heads.kv_heads:
            raise NotAPair(f"the assistant's {name} layers expect {heads.kv_heads} KV heads; the model's have {attention.n_kv_heads}")


def text_model(target_model: Any) -> gemma4_text.Model:
    """The Gemma 4 text model that `target_model` is, or has inside. Raises NotAPair."""
    text = getattr(target_model, "language_model", target_model)
    # By name: what matters is whose code it is, and a module may have been imported twice.
    if (type(text).__module__, type(text).__name__) != (gemma4_text.__name__, "Model"):
        kind = getattr(target_model, "model_type", None) or type(target_model).__name__
        raise NotAPair(f"the assistant is for a Gemma 4 model; this one is {kind}")
    return text


def lending_layer(target_model: Any, name: str) -> int | None:
    """The last layer of type `name` that has keys and values of its own, which is also the place of its cache; None where there is none. Raises NotAPair."""
    text = text_model(target_model)
    own = len(text.layers) - text.args.num_kv_shared_layers
    return next((place for place in reversed(range(own)) if text.layers[place].layer_type == name), None)
