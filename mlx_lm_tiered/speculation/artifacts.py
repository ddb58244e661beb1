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
        from .assistant.config import read

        read(path)
    else:
        from mlx_lm import utils

        try:
            utils._get_classes(config)
        except Exception as error:
            raise ValueError(f"mlx-lm cannot load it: {error}") from error
    return kind


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} is no configuration")
    return config
