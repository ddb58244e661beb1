"""The tensors of an assistant: which there must be, of which shapes, and where they are. Only headers are read here.

Names and shapes are those of Hugging Face transformers' `Gemma4AssistantForCausalLM`.
A matrix may be quantized as `mlx_lm.convert` does it: packed words under `.weight`,
and `.scales` and, in affine mode, `.biases` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from . import config as configuration
from .config import AssistantConfig, BadArtifact, read_json

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "U32")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
CENTROIDS, ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
# What some artifacts have and no layer that shares keys and values reads; mlx-lm leaves them out of its models, too.
UNREAD = (".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.", ".self_attn.rotary_emb.", ".input_max", ".input_min", ".output_max", ".output_min")
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# mlx's other formats have one scale byte a group, and one number of bits and group size each.
MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: `dtype` in safetensors' terms."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Tensors to load, by the module's names; which matrices are quantized, and how, in `nn.quantize`'s terms; whether the head is a centroid head."""

    tensors: Mapping[str, tuple[Path, str]]  # the file, and the tensor's name in it
    quantized: Mapping[str, dict[str, Any]]
    centroid_head: bool


def examine(path: str | PathLike[str]) -> tuple[AssistantConfig, Layout]:
    """What the artifact in the directory `path` says about itself, with no weights in memory. Raises BadArtifact."""
    directory = Path(path)
    config = configuration.read(directory)
    return config, read(directory, config)


def read(directory: Path, config: AssistantConfig) -> Layout:
    """Find and check all tensors. Raises BadArtifact for the first one that is missing, has another shape or type, or belongs to no assistant."""
    stored = _headers(directory)
    # The embeddings are only the head's, so a head of its own takes their place.
    names = {EMBEDDING: HEAD} if f"{HEAD}.weight" in stored else {}
    centroid_head = any(name.startswith("masked_embedding.") for name in stored)
    found: dict[str, tuple[Path, str]] = {}
    quantized: dict[str, dict[str, Any]] = {}
    for path, shape in _matrices(config, centroid_head):
        source = names.get(path, path)
        form = _form(stored, source, shape)
        if form is not None:
            quantized[path] = form
        for part in _parts(form):
            found[f"{path}.{part}"] = _take(stored, f"{source}.{part}")
    for name, length in _vectors(config, centroid_head):
        types = INTEGERS if name == ORDERING else FLOATS
        _check(stored, name, (length,), types)
        found[name] = _take(stored, name)
    taken = {name for _, name in found.values()}
    for name in stored.keys() - taken:
        if not any(part in name for part in UNREAD) and not (names and name.startswith(f"{EMBEDDING}.")):
            raise BadArtifact(f"the tensor {name[:100]} belongs to no assistant")
    return Layout(found, quantized, centroid_head)


def _matrices(config: AssistantConfig, centroid_head: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """Paths and shapes (outputs, inputs) of what may be quantized."""
    text, backbone = config.text, config.backbone_hidden_size
    width = text.hidden_size
    yield EMBEDDING, (text.vocab_size, width)
    yield "pre_projection", (width, 2 * backbone)
    yield "post_projection", (backbone, width)
    if centroid_head:
        yield CENTROIDS, (_clusters(config), width)
    for place, name in enumerate(config.text.layer_types):
        layer, heads = f"model.layers.{place}", text.num_attention_heads * config.heads[name].head_dim
        yield f"{layer}.self_attn.q_proj", (heads, width)
        yield f"{layer}.self_attn.o_proj", (width, heads)
        yield f"{layer}.mlp.gate_proj", (text.intermediate_size, width)
        yield f"{layer}.mlp.up_proj", (text.intermediate_size, width)
        yield f"{layer}.mlp.down_proj", (width, text.intermediate_size)


def _vectors(config: AssistantConfig, centroid_head: bool) -> Iterator[tuple[str, int]]:
    """Names and lengths of what is never quantized."""
    width = config.text.hidden_size
    yield "model.norm.weight", width
    if centroid_head:
        yield ORDERING, config.text.vocab_size
    for place, name in enumerate(config.text.layer_types):
        layer = f"model.layers.{place}"
        yield f"{layer}.self_attn.q_norm.weight", config.heads[name].head_dim
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}.{norm}_layernorm.weight", width
        yield f"{layer}.layer_scalar", 1


def _clusters(config: AssistantConfig) -> int:
    """How many, if the numbers of the centroid head fit together. Raises BadArtifact."""
    centroids, top, vocabulary = config.num_centroids, config.centroid_intermediate_top_k, config.text.vocab_size
    if centroids is None or vocabulary % centroids:
        raise BadArtifact(f"the assistant has a centroid head, but num_centroids ({centroids}) does not divide its vocabulary ({vocabulary})")
    if top is None or top > centroids:
        raise BadArtifact(f"the assistant has a centroid head, but centroid_intermediate_top_k ({top}) is not from 1 to num_centroids ({centroids})")
    return centroids


def _form(stored: Mapping[str, Stored], path: str, shape: tuple[int, int]) -> dict[str, Any] | None:
    """How the matrix is quantized, told from its tensors as mlx-lm does where a configuration does not name them; None when it is not."""
    scales = stored.get(f"{path}.scales")
    if scales is None:
        _check(stored, f"{path}.weight", shape, FLOATS)
        return None
    rows, columns = shape
    weight = _need(stored, f"{path}.weight")
    if weight.dtype != "U32" or len(weight.shape) != 2 or len(scales.shape) != 2 or 0 in (*weight.shape, *scales.shape):
        raise BadArtifact(f"{path}.weight and {path}.scales are not the tensors of a quantized matrix")
    bits, bits_left = divmod(weight.shape[1] * 32, columns)
    group_size, group_left = divmod(columns, scales.shape[1])
    affine = scales.dtype in FLOATS
    known = (bits in AFFINE_BITS and group_size in AFFINE_GROUPS) if affine else scales.dtype == "U8" and (bits, group_size) in MODES
    if bits_left or group_left or not known or {weight.shape[0], scales.shape[0]} != {rows}:
        raise BadArtifact(
            f"{path} is quantized to shapes {list(weight.shape)} and {list(scales.shape)} ({scales.dtype}), which is no format of mlx of a matrix {list(shape)}"
        )
    if affine:
        _check(stored, f"{path}.biases", scales.shape, (scales.dtype,))
    return {"bits": bits, "group_size": group_size, "mode": "affine" if affine else MODES[bits, group_size]}


def _parts(form: dict[str, Any] | None) -> tuple[str, ...]:
    if form is None:
        return ("weight",)
    return ("weight", "scales", "biases") if form["mode"] == "affine" else ("weight", "scales")


def _need(stored: Mapping[str, Stored], name: str) -> Stored:
    if name not in stored:
        raise BadArtifact(f"the assistant lacks the tensor {name}")
    return stored[name]


def _check(stored: Mapping[str, Stored], name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    tensor = _need(stored, name)
    if tensor.shape != shape:
        raise BadArtifact(f"{name} has the shape {list(tensor.shape)}, not {list(shape)} as config.json has it")
    if tensor.dtype not in types:
        raise BadArtifact(f"{name} has the type {tensor.dtype}, not {' or '.join(types)}")


def _take(stored: Mapping[str, Stored], name: str) -> tuple[Path, str]:
    return stored[name].file, name


def _headers(directory: Path) -> dict[str, Stored]:
    """All tensors of the files, by name. The safetensors library has checked that each lies in its file."""
    stored: dict[str, Stored] = {}
    for path in _files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():
                    if name in stored:
                        raise BadArtifact(f"the tensor {name[:100]} is in {stored[name].file.name} and in {path.name}")
                    part = file.get_slice(name)
                    stored[name] = Stored(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise BadArtifact(f"{path.name} cannot be read: {error}") from error
    return stored


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).exists():
        places = read_json(directory / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise BadArtifact(f"{INDEX} has no weight_map")
        names = set()
        for name in places.values():
            # Of this directory: an index names no other files.
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise BadArtifact(f"{INDEX} names {str(name)[:60]!r}, which is no file of weights beside it")
            names.add(name)
        files = [directory / name for name in sorted(names)]
    else:
        files = sorted(directory.glob("model*.safetensors"))
        if not files:
            raise BadArtifact(f"{directory} has no model*.safetensors")
    for file in files:
        if not file.is_file():
            raise BadArtifact(f"{file.name} is missing, or is no file")
    return files
