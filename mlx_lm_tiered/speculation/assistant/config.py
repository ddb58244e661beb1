"""What an assistant's config.json says, every value checked.

The keys and their defaults are those of Hugging Face transformers 5.24
(`models/gemma4_assistant`, `models/gemma4_unified_assistant` and the
configurations of the text models that they name), which leaves out of a file what
has its default. Values that only a target has a use for (per-layer inputs,
softcap, a wider MLP behind shared layers) are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
# By model type: the default of backbone_hidden_size, of the window, and of positions.
KINDS = {"gemma4_assistant": (1536, 512, 131072), "gemma4_unified_assistant": (3840, 1024, 262144)}
# Far above any model, far below what could not be computed with. Shapes are compared with the file's before anything is allocated.
LARGEST, MOST_LAYERS, MOST_DRAFTS = 2**24, 256, 64
LONGEST_JSON = 4 * 2**20
ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


class BadArtifact(ValueError):
    """A directory that is no assistant, or a damaged one; the text is a sentence that names what is wrong."""


@dataclass(frozen=True)
class Heads:
    """Keys and values of one type of layers: the dimension of a head, and how many heads."""

    head_dim: int
    kv_heads: int


@dataclass(frozen=True)
class Text:
    """The layers, under the names of mlx-lm's `gemma4_text.ModelArgs`.

    Not that class itself: a model's module that is imported before the plugin's hooks
    are in place keeps mlx-lm's attention, and configurations are read before.
    """

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    global_head_dim: int
    rms_norm_eps: float
    vocab_size: int
    num_kv_shared_layers: int
    rope_parameters: dict[str, dict[str, Any]]
    sliding_window: int
    max_position_embeddings: int
    layer_types: list[str]
    hidden_size_per_layer_input: int = 0
    use_double_wide_mlp: bool = False


@dataclass(frozen=True)
class AssistantConfig:
    """`text` are the layers; `heads` by layer type. Centroid counts are None where the file has nonsense: tied heads do not use them."""

    model_type: str
    backbone_hidden_size: int
    num_centroids: int | None
    centroid_intermediate_top_k: int | None
    num_assistant_tokens: int
    text: Text
    heads: Mapping[str, Heads]


def read(directory: Path) -> AssistantConfig:
    """The configuration of the assistant in `directory`. Raises BadArtifact."""
    top = _Fields("config.json", read_json(directory / "config.json"))
    kind = top.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadArtifact(f"config.json has the model_type {str(kind)[:40]!r}, which is no assistant's: {' or '.join(KINDS)}")
    backbone, window, positions = KINDS[kind]
    inner = top.get("text_config")
    if not isinstance(inner, dict):
        raise BadArtifact("config.json has no text_config, which describes the assistant's layers")
    text = _Fields("text_config", inner)
    layers = text.integer("num_hidden_layers", 30, high=MOST_LAYERS)
    types = _layer_types(text, layers)
    attention_heads = text.integer("num_attention_heads", 8)
    heads = _heads(text, types)
    for name, found in heads.items():
        if attention_heads % found.kv_heads:
            raise BadArtifact(f"text_config has {attention_heads} attention heads, which {found.kv_heads} KV heads of {name} layers do not divide")
    if text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise BadArtifact(f"text_config.hidden_activation is {str(text.get('hidden_activation'))[:40]!r}; assistants have gelu_pytorch_tanh")
    if text.get("enable_moe_block", False):
        raise BadArtifact("text_config.enable_moe_block is set; assistants have no experts")
    args = Text(
        hidden_size=text.integer("hidden_size", 2304),
        num_hidden_layers=layers,
        intermediate_size=text.integer("intermediate_size", 9216),
        num_attention_heads=attention_heads,
        head_dim=heads[SLIDING].head_dim if SLIDING in heads else text.integer("head_dim", 256),
        global_head_dim=heads[FULL].head_dim if FULL in heads else text.integer("global_head_dim", 512),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        vocab_size=text.integer("vocab_size", 262144),
        num_kv_shared_layers=layers,
        rope_parameters=_rope(text),
        sliding_window=text.integer("sliding_window", window),
        max_position_embeddings=text.integer("max_position_embeddings", positions),
        layer_types=types,
    )
    return AssistantConfig(
        model_type=kind,
        backbone_hidden_size=top.integer("backbone_hidden_size", backbone),
        num_centroids=top.count("num_centroids", 2048),
        centroid_intermediate_top_k=top.count("centroid_intermediate_top_k", 32),
        num_assistant_tokens=_drafts(directory),
        text=args,
        heads=heads,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BadArtifact."""
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST_JSON + 1)
    except OSError as error:
        raise BadArtifact(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > LONGEST_JSON:
        raise BadArtifact(f"{path.name} is longer than {LONGEST_JSON >> 20} MB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadArtifact(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadArtifact(f"{path.name} is no JSON object")
    return found


class _Fields:
    """The values of a JSON object, by name; absent ones, and null, have their default."""

    def __init__(self, where: str, values: Mapping[str, Any]):
        self.where = where
        self._values = values

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int, high: int = LARGEST) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= high:
            raise BadArtifact(f"{self.where}.{name} is {str(value)[:40]}, not an integer from 1 to {high}")
        return value

    def count(self, name: str, default: int) -> int | None:
        value = self.get(name, default)
        return value if type(value) is int and 1 <= value <= LARGEST else None

    def number(self, name: str, default: float, high: float = math.inf) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= high or math.isinf(value):
            raise BadArtifact(f"{self.where}.{name} is {str(value)[:40]}, not a number above 0{'' if math.isinf(high) else f' and up to {high:g}'}")
        return float(value)


def _layer_types(text: _Fields, layers: int) -> list[str]:
    types = text.get("layer_types")
    if types is None:
        # As transformers has it: five sliding ones and a full one, and a full one at the end.
        types = [FULL if place % 6 == 5 else SLIDING for place in range(layers)]
        types[-1] = FULL
    if not isinstance(types, list) or len(types) != layers or any(name not in (SLIDING, FULL) for name in types):
        raise BadArtifact(f"text_config.layer_types is not a list of {layers} of {SLIDING} and {FULL}")
    return types


def _heads(text: _Fields, types: list[str]) -> dict[str, Heads]:
    """Head dimension and KV heads by layer type: by keys of their own for full layers, or, as transformers since 5.2 writes it, by layer in `per_layer_config`."""
    dim, kv = text.integer("head_dim", 256), text.integer("num_key_value_heads", 4)
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        global_kv = text.integer("num_global_key_value_heads", kv) if text.get("attention_k_eq_v", False) else kv
        both = {SLIDING: Heads(dim, kv), FULL: Heads(text.integer("global_head_dim", 512), global_kv)}
        found = {name: both[name] for name in types}
    else:
        if not isinstance(by_layer, dict):
            raise BadArtifact("text_config.per_layer_config is no object")
        found = {}
        for place, name in enumerate(types):
            own = by_layer.get(str(place), {})
            if not isinstance(own, dict):
                raise BadArtifact(f"text_config.per_layer_config.{place} is no object")
            fields = _Fields(f"text_config.per_layer_config.{place}", own)
            heads = Heads(fields.integer("head_dim", dim), fields.integer("num_key_value_heads", kv))
            if found.setdefault(name, heads) != heads:
                raise BadArtifact(f"text_config.per_layer_config gives {name} layers different heads")
    for name, heads in found.items():
        if heads.head_dim % 2:
            raise BadArtifact(f"heads of {name} layers have {heads.head_dim} numbers, which cannot be rotated in pairs")
    return found


def _rope(text: _Fields) -> dict[str, dict[str, Any]]:
    given = text.get("rope_parameters", ROPE)
    made: dict[str, dict[str, Any]] = {}
    for name, default in ROPE.items():
        own = given.get(name, default) if isinstance(given, dict) else None
        if not isinstance(own, dict):
            raise BadArtifact(f"text_config.rope_parameters has no object for {name}")
        fields = _Fields(f"text_config.rope_parameters.{name}", own)
        kind = fields.get("rope_type", "default")
        if kind not in ("default", "proportional"):
            raise BadArtifact(f"text_config.rope_parameters.{name}.rope_type is {str(kind)[:40]!r}; assistants have default and proportional")
        made[name] = {
            "rope_type": kind,
            "rope_theta": fields.number("rope_theta", default["rope_theta"]),
            "partial_rotary_factor": fields.number("partial_rotary_factor", 1.0, high=1.0),
            "factor": fields.number("factor", 1.0),
        }
    return made


def _drafts(directory: Path) -> int:
    """How many tokens the assistant is meant to draft at a time; 1 where nothing says so."""
    path = directory / "generation_config.json"
    if not path.exists():
        return 1
    return _Fields(path.name, read_json(path)).integer("num_assistant_tokens", 1, high=MOST_DRAFTS)
