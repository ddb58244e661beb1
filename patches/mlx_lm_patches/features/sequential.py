"""Seam: prompt boundaries of requests that the server answers one at a time.

Upstream's batches store their caches at the ends of a prompt's segments, its
sequential path only after the reply. Caches that cannot be shortened (recurrent
state, wrapped rings) then serve no later turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import checkpointing, places, singly
from ..admitting import admit_one, watch_one
from ..holding import mark, remembering
from ..progress import Progress, stoppable
from ..runtime import Fetch, Runtime
from ..seam import Seam

# Options of generate_step that decide what a prefill leaves in the caches.
_PREFILL = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")


def build_tokenize(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    remembered = remembering(original)

    @functools.wraps(original)
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        result = remembered(self, tokenizer, request, args)
        runtime.here.segments = (result[1], result[2])
        checkpointing.asked(runtime, self, args, result)
        return result

    mark(_tokenize)
    return _tokenize


def build_stream_generate(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    keeping = _keeping_boundaries(original, runtime)

    @functools.wraps(original)
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        fetch = runtime.here.fetch
        mailbox = admit_one(runtime, fetch, kwargs)
        steps = begin(*args, **kwargs)
        return steps if mailbox is None else watch_one(runtime, fetch, kwargs, steps)

    def begin(*args: Any, **kwargs: Any) -> Any:
        following = checkpointing.take(runtime, kwargs.get("prompt") or []) if runtime.here.following is not None else None
        if following is None or args:
            return keeping(*args, **kwargs)
        return singly.stream(following, runtime, original if following.state is not None else keeping, kwargs)

    return stream_generate


def _keeping_boundaries(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        fetch, runtime.here.fetch = runtime.here.fetch, None
        segments, runtime.here.segments = runtime.here.segments, None
        if fetch is None or not _follows(fetch, args, kwargs):
            if "prompt_progress_callback" in kwargs:
                kwargs["prompt_progress_callback"] = stoppable(runtime, kwargs["prompt_progress_callback"])
            return original(*args, **kwargs)
        rest, caches = kwargs["prompt"], kwargs["prompt_cache"]
        tokens = list(fetch.tokens[: fetch.count])
        progress = Progress(
            runtime, fetch.prefixes, fetch.source, tokens, caches, len(rest), kwargs.get("prompt_progress_callback")
        )
        kwargs["prompt_progress_callback"] = progress
        part = _before_tail(segments, fetch, kwargs, runtime) if runtime.active else 0
        if part > 0:
            _prefill(part, progress, kwargs)
            kwargs["prompt"] = rest[part:]
        return original(*args, **kwargs)

    return stream_generate


def _follows(fetch: Fetch, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is the generation that the lookup was made for, and one whose prefill can be followed."""
    if args or kwargs.get("draft_model") is not None:
        return False
    rest, caches = kwargs.get("prompt"), kwargs.get("prompt_cache")
    return isinstance(rest, list) and isinstance(caches, list) and fetch.cached + len(rest) == fetch.count


def _before_tail(segments: Any, fetch: Fetch, kwargs: dict[str, Any], runtime: Runtime) -> int:
    """How many of the remaining tokens to prefill by themselves, to keep a boundary before a thinking tail; 0 for none.

    The next turn's prompt will not contain the tail. Caches that can be cut need
    no boundary. Logits processors count tokens, so their prompt is left whole.
    """
    from mlx_lm.models.cache import KVCache

    if segments is None or len(segments[0]) < 2 or segments[1][-1] != "assistant":
        return 0
    if kwargs.get("logits_processors") or kwargs.get("input_embeddings") is not None:
        return 0
    if all(runtime.plain_class(cache) is KVCache for cache in kwargs["prompt_cache"]):
        return 0
    return max(0, fetch.count - len(segments[0][-1]) - fetch.cached)


def _prefill(part: int, progress: Progress, kwargs: dict[str, Any]) -> None:
    """Run the first `part` tokens through the model and keep what the caches hold then."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step, generation_stream, wired_limit

    options = {name: kwargs[name] for name in _PREFILL if name in kwargs}
    prompt = mx.array(kwargs["prompt"][:part])
    stream = kwargs.get("stream", generation_stream)
    with wired_limit(kwargs["model"], [stream]):
        for _ in generate_step(
            prompt,
            kwargs["model"],
            stream,
            max_tokens=0,
            prompt_cache=kwargs["prompt_cache"],
            prompt_progress_callback=progress,
            **options,
        ):
            raise AssertionError("a prefill without tokens to generate gave one")
    progress.offset = part
    progress.keep(part)


SEAMS = [
    Seam(
        feature="sequential",
        module="mlx_lm.server",
        qualname="stream_generate",
        kind="global",
        signature="(model, tokenizer, prompt, max_tokens=, draft_model=, stream=, **kwargs)",
        bodies={"568085144938127c": "0.32.0", "ed579e3ab264d71a": "0.32.1 0.32.2"},
        why="keeps the caches at the prompt's end, and before a thinking tail",
        until="upstream stores prompt boundaries on its sequential path",
        build=build_stream_generate,
    ),
    Seam(
        feature="sequential",
        module="mlx_lm.server",
        qualname="ResponseGenerator._tokenize",
        kind="wrap",
        signature="(self, tokenizer, request, args)",
        bodies={"ea9f08ddf86ea471": "0.32.0", "997cb5b1cbbdab96": "0.32.1 0.32.2"},
        why="tells where a thinking tail begins; is asked once for a request that was held back",
        until="upstream stores prompt boundaries on its sequential path",
        build=build_tokenize,
    ),
    Seam(
        feature="sequential",
        module="mlx_lm.server",
        qualname="ResponseGenerator._serve_single",
        kind="check",
        signature="(self, request, stream)",
        bodies={"766fe666ba59e03d": "0.32.0", "95827aebdeb09ec7": "0.32.1 0.32.2"},
        why="looks up, then generates, on one thread with one list of caches",
        until="upstream stores prompt boundaries on its sequential path",
    ),
    Seam(
        feature="sequential",
        **places.GENERATE_STEP,
        kind="check",
        why="reports progress when all but one token of the prompt are in the caches",
        until="upstream stores prompt boundaries on its sequential path",
    ),
]
