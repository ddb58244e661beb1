"""Schemes of single layers: ``kv_config.json``, and what a model's configuration says about its KV.

``kv_config.json`` is a list of ``{"layer_idx": 3, "bits": 4, "group_size": 64}``. A layer
that it does not list stays in full precision. `layer_idx` counts the caches that the
model makes. That is the layer's own number where every layer has a cache, and where the
last layers read the KV of earlier ones (Gemma 3n and 4: those layers have no cache, and
cannot be listed); a model that makes caches for some kinds of layers only (Nemotron-H)
counts those.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .spec import Affine, Form, Spec, Turbo

FILE = "kv_config.json"
LARGEST_FILE = 1 << 20


def read(path: Path) -> dict[int, Affine]:
    """The schemes of a file's layers. Raises ValueError with one sentence, which names the layer."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"{path} is larger than any list of layers")
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a list of layers")
    layers: dict[int, Affine] = {}
    for place, entry in enumerate(entries):
        index = entry.get("layer_idx") if isinstance(entry, dict) else None
        if type(index) is not int:
            raise ValueError(f"{path}: entry {place} has no layer_idx")
        if index in layers:
            raise ValueError(f"{path}: layer {index} is listed twice")
        layers[index] = _affine(path, index, entry)
    return layers


def _affine(path: Path, index: int, entry: Mapping[str, Any]) -> Affine:
    if unknown := sorted(set(entry) - {"layer_idx", "bits", "group_size"}):
        raise ValueError(f"{path}: layer {index} has a field {unknown[0]!r}, which means nothing")
    for name in ("bits", "group_size"):
        if type(entry.get(name)) is not int:
            raise ValueError(f"{path}: layer {index} has no {name}")
    try:
        return Affine(entry["bits"], entry["group_size"])
    except ValueError as error:
        raise ValueError(f"{path}: layer {index}: {error}") from None


def for_model(spec: Spec, path: Path | None) -> dict[int, Affine] | Form | None:
    """What a scheme asks for: of single caches, of all, or of none. Raises ValueError."""
    if not spec.config:
        return spec.form
    if spec.path is None and path is None:
        raise ValueError(f"there is no {FILE} beside a model that has no directory; name the file with config:PATH")
    return read(spec.path if spec.path is not None else Path(path or "") / FILE)


def check(spec: Spec, path: Path) -> None:
    """Refuse what a model in a local directory cannot be given, as far as its configuration tells. Raises ValueError."""
    asked = for_model(spec, path)
    try:
        config = json.loads((path / "config.json").read_text())
        config = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError):
        return  # the load will say what is wrong with it
    caches = config.get("num_hidden_layers")
    if type(caches) is not int:
        return
    caches -= config.get("num_kv_shared_layers") or 0
    for index, form in asked.items() if isinstance(asked, dict) else enumerate([asked] * caches):
        if not 0 <= index < caches:
            raise ValueError(f"layer {index} is out of range: {path.name} has KV for layers 0 to {caches - 1}")
        dim = None if form is None or _stays(config, index, form) else _head_dim(config, index)
        if form is not None and dim is not None and (reason := form.unfit(dim)):
            raise ValueError(f"layer {index}: {reason}")


def _head_dim(config: Mapping[str, Any], index: int) -> int | None:
    """The head dimension of a layer; None where KV is compressed or the configuration does not tell, which the first run shows."""
    if any(config.get(name) for name in ("kv_lora_rank", "v_head_dim", "swa_head_dim")):
        return None
    dim = config.get("head_dim") or _default_head_dim(config.get("model_type"))
    if "global_head_dim" in config:  # Gemma 4: full attention has other heads than the windows
        kinds = config.get("layer_types")
        kind = kinds[index] if isinstance(kinds, list) and index < len(kinds) else None
        dim = {"full_attention": config["global_head_dim"] or dim, "sliding_attention": dim}.get(str(kind))
        return dim if type(dim) is int else None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if type(dim) is int:
        return dim
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def _default_head_dim(model_type: Any) -> int | None:
    """What mlx-lm takes for a model whose configuration has no `head_dim` (Gemma 3's often has none), from its source: what it imports now could not be hooked any more."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or package.origin is None or not isinstance(model_type, str) or not re.fullmatch(r"\w+", model_type):
        return None
    try:
        text = (Path(package.origin).parent / "models" / f"{model_type}.py").read_text()
    except OSError:
        return None
    found = re.search(r"^    head_dim: \S+ = (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _stays(config: Mapping[str, Any], index: int, form: Form) -> bool:
    """Whether the configuration tells that a form leaves a layer as it is."""
    kinds = config.get("layer_types")
    return isinstance(form, Turbo) and isinstance(kinds, list) and index < len(kinds) and kinds[index] != "full_attention"
