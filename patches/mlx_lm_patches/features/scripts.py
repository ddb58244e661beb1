"""Seam: prefixes for scripts, `mlx_lm.generate` and `mlx_lm.chat`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm_hooks.types import ModelSource, PrefixCache

from .. import places
from ..progress import Progress
from ..runtime import Runtime
from ..seam import Seam
from ..sequence import speculating
from .delayed import exact_start
from .loads import scheme_of, source_of


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    parameters = inspect.signature(original)
    original = exact_start(speculating(original, parameters, runtime), parameters, runtime)
    announced: set[ModelSource] = set()

    def find(call: inspect.BoundArguments) -> tuple[PrefixCache, ModelSource] | None:
        """The prefix cache and the model for a call that can use them."""
        options = call.arguments
        # The server's own calls are served where it looks up.
        if not runtime.active or isinstance(options["prompt_progress_callback"], Progress):
            return None
        if options["input_embeddings"] is not None or options["max_kv_size"] is not None:
            return None
        if getattr(options["prompt"], "ndim", None) != 1 or len(options["prompt"]) < 2:
            return None
        if options["prompt_cache"] is not None and not _fresh(options["prompt_cache"], options["model"]):
            return None
        prefixes = runtime.script_prefixes()
        if prefixes is None:
            return None
        own = [options[name] for name in ("kv_bits", "kv_group_size", "quantized_kv_start")]
        source = source_of(options["model"], scheme_of(runtime, options["model"], own))
        if source not in announced:
            announced.add(source)
            runtime.plugins.model_loaded(source)
        return prefixes, source

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Any:
        try:
            call = parameters.bind(*args, **kwargs)
            call.apply_defaults()
            found = find(call)
        except Exception as error:
            runtime.fault("preparing a generation", error)
            found = None
        if found is None:
            return original(*args, **kwargs)
        return _generate(original, runtime, call, *found)

    return generate_step


def _generate(
    original: Callable[..., Any], runtime: Runtime, call: inspect.BoundArguments, prefixes: PrefixCache, source: ModelSource
) -> Iterator[Any]:
    """Upstream's generation over the longest known prefix, which keeps what it computed when it ends or is closed."""
    from mlx_lm.models.cache import make_prompt_cache

    options = call.arguments
    tokens: list[int] = options["prompt"].tolist()
    own = options["prompt_cache"] is None
    caches: list[Any] = make_prompt_cache(options["model"]) if own else options["prompt_cache"]
    known = False
    try:
        known = prefixes.owns(caches)
        taken = prefixes.take(source, tokens) if known else None
        if taken is not None and 0 < taken.length < len(tokens):
            if not _fits(taken.caches, caches, runtime):
                raise ValueError("the model object has been given other caches since the prefix was stored")
            # In place: a caller's list is the caller's way to see the caches.
            caches[:] = taken.caches
            options["prompt"] = options["prompt"][taken.length :]
    except Exception as error:
        runtime.fault("taking a prefix", error)
    options["prompt_cache"] = caches
    rest = len(options["prompt"])
    if known:
        options["prompt_progress_callback"] = Progress(
            runtime, prefixes, source, tokens, caches, rest, options["prompt_progress_callback"]
        )
    key = list(tokens)
    steps = original(*call.args, **call.kwargs)
    try:
        for token, logprobs in steps:
            # Upstream runs one step ahead: the caches hold a token when it is yielded.
            key.append(token)
            yield token, logprobs
    except GeneratorExit:
        steps.close()
        if len(key) > len(tokens):
            _keep(runtime, prefixes, source, key, caches, own, known)
        raise
    _keep(runtime, prefixes, source, key, caches, own, known)


def _keep(
    runtime: Runtime, prefixes: PrefixCache, source: ModelSource, key: list[int], caches: list[Any], own: bool, known: bool
) -> None:
    if not known or not runtime.active:
        return
    try:
        held = lengths(caches)
        if held - {len(key)}:
            raise ValueError(f"the caches hold {sorted(held)} tokens where {len(key)} were run")
        if own:
            prefixes.put(source, key, caches, role="assistant")
        else:
            prefixes.snapshot(source, key, caches, role="assistant")
    except Exception as error:
        runtime.fault("storing a prefix", error)


def lengths(caches: list[Any]) -> set[int]:
    """How many tokens the caches say they have seen; those that do not count, and those that the model does not use, are left out."""
    result: set[int] = set()
    for cache in caches:
        if hasattr(cache, "caches"):
            result |= lengths(list(cache.caches))
        elif isinstance(offset := getattr(cache, "offset", None), int) and offset > 0:
            result.add(offset)
    return result


def _fresh(caches: Any, model: Any) -> bool:
    """Whether a caller's caches are empty and such as the model would make itself, so that stored ones can take their place."""
    from mlx_lm.models.cache import make_prompt_cache

    if not isinstance(caches, list) or not all(cache.empty() for cache in caches):
        return False
    return [_shape(cache) for cache in caches] == [_shape(cache) for cache in make_prompt_cache(model)]


def _fits(stored: list[Any], fresh: list[Any], runtime: Runtime) -> bool:
    """Whether stored caches are what the fresh ones become, which may be quantized on the way."""
    return [_plain(cache, runtime) for cache in stored] == [_plain(cache, runtime) for cache in fresh]


def _plain(cache: Any, runtime: Runtime) -> Any:
    """The shape that a cache had before it was quantized."""
    if hasattr(cache, "caches"):
        return type(cache), [_plain(inner, runtime) for inner in cache.caches]
    names = ("max_size", "keep", "chunk_size")
    return runtime.plain_class(cache), [getattr(cache, name, None) for name in names]


def _shape(cache: Any) -> Any:
    if hasattr(cache, "caches"):
        return type(cache), [_shape(inner) for inner in cache.caches]
    names = ("max_size", "keep", "group_size", "bits", "chunk_size")
    return type(cache), [getattr(cache, name, None) for name in names]


SEAMS = [
    Seam(
        feature="scripts",
        **places.GENERATE_STEP,
        kind="wrap",
        why="starts from the longest stored prefix and keeps what was computed",
        until="upstream takes a prompt cache from a plugin",
        build=build,
    ),
    Seam(
        feature="scripts",
        module="mlx_lm.generate",
        qualname="stream_generate",
        kind="check",
        signature="(model, tokenizer, prompt, max_tokens=, draft_model=, stream=, **kwargs)",
        bodies={"568085144938127c": "0.32.0", "ed579e3ab264d71a": "0.32.1 0.32.2"},
        why="generates through generate_step of its own module",
        until="upstream takes a prompt cache from a plugin",
    ),
]
