"""Loading an assistant from a directory: config.json and safetensors, one file or several with an index.

Files are not trusted: sizes are compared with what the files have before anything is
made of them, and every fault is a sentence. What the tensors say goes before what the
configuration says: unified artifacts declare centroids and have none.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
import numpy as np

from . import weights
from .config import AssistantConfig, BadArtifact
from .model import AssistantModel

__all__ = ["AssistantConfig", "BadArtifact", "load"]


def load(path: str | PathLike[str]) -> AssistantModel:
    """The assistant in the directory `path`, its weights in memory. Raises BadArtifact.

    Matrices that are quantized stay so. `config.num_assistant_tokens` of what is
    returned is how many tokens it is meant to draft at a time.
    """
    config, layout = weights.examine(path)
    model = AssistantModel(config, layout.centroid_head)
    if layout.quantized:
        nn.quantize(model, class_predicate=lambda place, module: layout.quantized.get(place, False))
    loaded = _tensors(layout)
    if layout.centroid_head:
        loaded[weights.ORDERING] = _ordering(loaded[weights.ORDERING])
    try:
        model.load_weights(list(loaded.items()))
        mx.eval(model.parameters())
    except (ValueError, RuntimeError) as error:
        raise BadArtifact(f"the assistant's weights cannot be loaded: {error}") from error
    model.eval()
    return model


def _tensors(layout: weights.Layout) -> dict[str, mx.array]:
    """The arrays, by the module's names."""
    files: dict[Path, Any] = {}
    arrays = {}
    for name, (file, stored) in layout.tensors.items():
        try:
            if file not in files:
                files[file] = mx.load(str(file))
            arrays[name] = files[file][stored]
        except (RuntimeError, KeyError) as error:
            raise BadArtifact(f"{file.name} cannot be read: {error}") from error
    return arrays


def _ordering(stored: mx.array) -> mx.array:
    """Each token once, or a cluster would name embeddings that there are not."""
    tokens = np.array(stored).astype(np.int64)
    if not np.array_equal(np.sort(tokens), np.arange(tokens.size)):
        raise BadArtifact(f"{weights.ORDERING} does not name each token once")
    return mx.array(tokens.astype(np.uint32))
