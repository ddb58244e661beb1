"""What ``--draft-model`` names: a directory or one of the hub's models, and whether it is a model or an assistant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Models that draft from another one's keys and values and cannot generate by themselves, as their config.json calls them.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def resolve(name: str) -> Path:
    """The directory of a model, as mlx-lm finds it: a path, or a hub name, which is downloaded if need be. Raises ValueError with one sentence."""
    path = Path(name)
    if not path.exists():
        from mlx_lm import utils

        try:
            path = Path(utils._download(name))
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0].strip()
            raise ValueError(f"there is no such directory, and the hub gave no such model ({type(error).__name__}: {reason})") from error
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path.resolve()


def model_type(path: Path) -> str:
    """The type that a model's configuration names, of which mlx-lm, or for assistants the plugin, must have code. Raises ValueError with one sentence."""
    config = _config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{path / 'config.json'} names no model_type")
    if not any(path.glob("model*.safetensors")):
        raise ValueError(f"{path} has no weights (model*.safetensors)")
    if kind in ASSISTANTS:
        from .assistant.weights import examine

        examine(path)
    elif not _has_code(kind):
        raise ValueError(f"mlx-lm cannot load it: it has no code for the model type {kind}")
    return kind


def _has_code(kind: str) -> bool:
    """Whether mlx-lm has a module for a model type. Found, not imported: a model's module that comes before the plugin's hooks keeps mlx-lm's attention."""
    from importlib.util import find_spec

    from mlx_lm import utils

    names = {utils.MODEL_REMAPPING.get(kind, kind), *(name for (one, _), name in utils.MODEL_ARCHITECTURE_REMAPPING.items() if one == kind)}
    return any(name.isidentifier() and find_spec(f"mlx_lm.models.{name}") is not None for name in names)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} is no configuration")
    return config
