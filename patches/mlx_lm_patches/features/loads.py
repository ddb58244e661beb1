"""Seam: which files a model in memory came from."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm_hooks.types import ModelSource

from ..runtime import Runtime, kv_scheme
from ..seam import Seam

_ATTRIBUTE = "_mlx_lm_patches_loaded"
_serials = itertools.count(1)


@dataclass(frozen=True)
class Loaded:
    """Where a model's weights came from. `weights` are the identities of its arrays then, to notice training and quantizing.

    `path` is None when the files alone do not tell what the model computes.
    """

    path: Path | None
    adapter_path: Path | None
    weights: tuple[int, ...]
    serial: int


def source_of(model: Any, scheme: str = "plain") -> ModelSource:
    """The source of a model object of a script. Changed weights make it a model of its own, known by nothing but itself."""
    weights = _weights(model)
    loaded = _recorded(model)
    if loaded is None or loaded.weights != weights:
        loaded = Loaded(None, None, weights, next(_serials))
        _record(model, loaded)
    if loaded.path is None:
        return ModelSource(kv_scheme=scheme, key=("model", loaded.serial), generation=loaded.serial)
    return ModelSource(loaded.path, loaded.adapter_path, kv_scheme=scheme, generation=loaded.serial)


def path_of(model: Any) -> Path | None:
    """The directory that a model object was loaded from, as far as that is known."""
    loaded = _recorded(model)
    return loaded.path if loaded is not None else None


def scheme_of(runtime: Runtime, model: Any, options: Sequence[Any]) -> str:
    """How a model's KV is stored: under upstream's own `options` (bits, group size, start), where they were given, or a plugin's scheme."""
    if options[0] is not None or runtime.scheme is None:
        return kv_scheme(*options)
    return runtime.scheme.name(path_of(model))


def _recorded(model: Any) -> Loaded | None:
    loaded = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return loaded if isinstance(loaded, Loaded) else None


def _record(model: Any, loaded: Loaded) -> None:
    # Not through nn.Module's own __setattr__, which would make it a member of the model.
    object.__setattr__(model, _ATTRIBUTE, loaded)


def _weights(model: Any) -> tuple[int, ...]:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(model.parameters())  # (name, array), without a destination
    return tuple(id(array) for _, array in leaves)


def build_load_model(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_model(model_path: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model_path, *args, **kwargs)
        if runtime.active:
            try:
                # Changes to the configuration are no part of the files; None and False ask for nothing.
                config = kwargs.get("model_config") or (args[2] if len(args) > 2 else None) or {}
                plain = not any(config.values()) and "get_model_classes" not in kwargs and len(args) < 4
                path = Path(model_path).resolve() if plain else None
                _record(result[0], Loaded(path, None, _weights(result[0]), next(_serials)))
            except Exception as error:
                runtime.fault("noting a model's path", error)
        return result

    return load_model


def build_load_adapters(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_adapters(model: Any, adapter_path: Any) -> Any:
        loaded = _recorded(model)
        unchanged = loaded is not None and loaded.adapter_path is None and _weights(model) == loaded.weights
        result = original(model, adapter_path)
        if runtime.active:
            try:
                path = loaded.path if loaded is not None and unchanged else None
                adapter = Path(adapter_path).resolve() if path is not None else None
                _record(result, Loaded(path, adapter, _weights(result), next(_serials)))
            except Exception as error:
                runtime.fault("noting an adapter's path", error)
        return result

    return load_adapters


def build_provider_load(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.active and self.model_key is not None and (before := runtime.sources.get(self.model_key)) is not None:
            try:
                runtime.plugins.model_unloading(before)
            except Exception as error:
                runtime.fault("announcing that a model goes", error)
        result = original(self, *args, **kwargs)
        if runtime.active:
            try:
                source = _provided(self, runtime)
                runtime.sources[self.model_key] = source
                runtime.served = weakref.ref(self.model), source
                runtime.plugins.model_loaded(source)
            except Exception as error:
                runtime.fault("announcing a model", error)
            for interested in runtime.scheme, runtime.speculation:
                try:
                    if interested is not None:
                        interested.model_loaded(self.model)
                except Exception as error:
                    runtime.fault("preparing for a model", error)
        return result

    return _load


def _provided(provider: Any, runtime: Runtime) -> ModelSource:
    """The source of what a server has just loaded."""
    args = provider.cli_args
    options = [getattr(args, name, None) for name in ("kv_bits", "kv_group_size", "quantized_kv_start")]
    runtime.loads += 1
    draft = None
    if provider.draft_model is not None:
        loaded = _recorded(provider.draft_model)
        path = loaded.path if loaded is not None else None
        draft = ModelSource(path, kv_scheme=scheme_of(runtime, provider.draft_model, options), key=provider.model_key[2], generation=runtime.loads)
    loaded = _recorded(provider.model)
    scheme, shard = scheme_of(runtime, provider.model, options), runtime.ranks.shard if runtime.ranks is not None else ""
    source = ModelSource(draft=draft, kv_scheme=scheme, key=provider.model_key, generation=runtime.loads, shard=shard)
    if loaded is None or (draft is not None and draft.path is None):
        return source
    return replace(source, path=loaded.path, adapter_path=loaded.adapter_path)


SEAMS = [
    Seam(
        feature="loads",
        module="mlx_lm.utils",
        qualname="load_model",
        kind="wrap",
        signature="(model_path, lazy=, strict=, model_config=, get_model_classes=, trust_remote_code=)",
        bodies={"590f7954291e03a3": "0.32.0", "43151bb7e6dcf205": "0.32.1", "f337bdf1791f0165": "0.32.2"},
        why="notes the directory on the model that was loaded from it",
        until="upstream's models know their directory",
        build=build_load_model,
    ),
    Seam(
        feature="loads",
        module="mlx_lm.utils",
        qualname="load_adapters",
        kind="wrap",
        signature="(model, adapter_path)",
        bodies={"a07df9d352ccd574": "0.32.0 0.32.1 0.32.2"},
        why="notes the adapter on the model that it was applied to",
        until="upstream's models know their adapter",
        build=build_load_adapters,
    ),
    Seam(
        feature="loads",
        module="mlx_lm.utils",
        qualname="load",
        kind="check",
        signature=(
            "(path_or_hf_repo, tokenizer_config=, model_config=, adapter_path=, lazy=, return_config=, "
            "revision=, trust_remote_code=)"
        ),
        bodies={"0b0971874e2adf4c": "0.32.0 0.32.1 0.32.2"},
        why="loads through load_model and load_adapters of its own module",
        until="upstream's models know their directory",
    ),
]
SERVER_SEAMS = [
    Seam(
        feature="loads",
        module="mlx_lm.server",
        qualname="ModelProvider._load",
        kind="wrap",
        signature="(self, model_path, adapter_path=, draft_model_path=)",
        bodies={"f42576116b010fe4": "0.32.0", "b3229dd5a3d88f5a": "0.32.1 0.32.2"},
        why="tells the plugin which model is about to be served",
        until="upstream announces loads",
        build=build_provider_load,
    ),
]
SEAMS += SERVER_SEAMS
