"""Sequential generations whose caches a scheme converts when they hold a number of tokens: the prefill is split there.

Upstream's own conversion looks after each chunk, so what it computes depends on how a
prompt is cut into chunks, and on how much of it was taken from a cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ..progress import with_history
from ..runtime import Runtime


def exact_start(original: Callable[..., Any], parameters: inspect.Signature, runtime: Runtime) -> Callable[..., Any]:
    """`generate_step` that stops in a prefill where the scheme starts. `original` itself under a scheme without a start."""
    scheme = runtime.scheme
    if scheme is None or scheme.start == 0:
        return original

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Any:
        # As it is now: when this was made, it may not have been hooked yet.
        from mlx_lm.models.cache import make_prompt_cache

        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        if not runtime.active or options["kv_bits"] is not None or options["input_embeddings"] is not None:
            return original(*args, **kwargs)
        fresh = make_prompt_cache(options["model"], options["max_kv_size"])
        if not scheme.converts(options["model"]):
            return original(*args, **kwargs)
        if options["prompt_cache"] is None:
            options["prompt_cache"] = fresh
        options["quantized_kv_start"] = scheme  # which `schemes` knows where upstream asks whether to convert
        scheme.convert(options["prompt_cache"])
        part = scheme.start - _held(options["prompt_cache"])
        if not 0 < part < len(options["prompt"]):
            return original(*call.args, **call.kwargs)
        return _in_two(original, call, part)

    return generate_step


def _held(caches: Any) -> int:
    """The tokens that the caches hold."""
    counts = [_held(c.caches) if hasattr(c, "caches") else getattr(c, "offset", 0) for c in caches]
    return max((n for n in counts if isinstance(n, int)), default=0)


def _in_two(original: Callable[..., Any], call: inspect.BoundArguments, part: int) -> Iterator[Any]:
    options = call.arguments
    prompt, processors, progress = options["prompt"], options["logits_processors"], options["prompt_progress_callback"]
    total = len(prompt)
    first = {**options, "prompt": prompt[:part], "max_tokens": 0, "logits_processors": None, "sampler": None}
    first["prompt_progress_callback"] = progress and (lambda done, _: done < part and progress(done, total))
    for _ in original(**first):
        raise AssertionError("a prefill without tokens to generate gave one")
    second = {**options, "prompt": prompt[part:]}
    second["prompt_progress_callback"] = progress and (lambda done, _: progress(part + done, total))
    if processors:
        second["logits_processors"] = [with_history(processor, prompt[:part]) for processor in processors]
    yield from original(**second)
