"""A model under KV schemes in this process, as a script has it: loading, and prefilling as mlx-lm does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream

from mlx_lm_hooks import disable, enable
from mlx_lm_tiered.schemes.layers import for_model
from mlx_lm_tiered.schemes.plan import Plan, make
from mlx_lm_tiered.schemes.spec import Spec, parse

CHUNK = 2048


@contextmanager
def scheme(spec: Spec) -> Iterator[None]:
    """The plugin on with a scheme, without its tiers."""
    enable("tiered", kv_scheme=str(spec), prompt_cache_bytes=0)
    try:
        yield
    finally:
        disable()


def named(schemes: Sequence[str]) -> list[tuple[str, Spec]]:
    """Schemes by what the command line calls them. Raises ValueError."""
    return [(text.strip(), parse(text)) for text in schemes]


def loaded(model_path: Path, specs: Sequence[Spec]) -> tuple[Any, Any]:
    """A model whose attention is hooked for these schemes, and its tokenizer."""
    import mlx_lm.server  # noqa: F401  (hooked before the model's modules are imported)

    with scheme(next((spec for spec in specs if not spec.plain), parse("bf16"))):
        from mlx_lm import load

        return load(str(model_path))


def planned(model: Any, spec: Spec, model_path: Path) -> Plan:
    """What a scheme makes of the model. Raises ValueError where the model cannot have it, and the plugin would leave it in full precision."""
    plain_caches = upstream.make_prompt_cache(model)
    with scheme(spec):
        return make(model, plain_caches, for_model(spec, model_path), spec.start)


def prefilled(model: Any, tokens: Sequence[int], caches: list[Any] | None = None) -> list[Any]:
    """Caches, new ones unless given, that hold these tokens, too, prefilled as mlx-lm does. Call it under a scheme."""
    from mlx_lm.generate import generate_step

    if caches is None:
        caches = upstream.make_prompt_cache(model)
    for _ in generate_step(mx.array(list(tokens)), model, max_tokens=0, prefill_step_size=CHUNK, prompt_cache=caches):
        raise AssertionError("a prefill without tokens to generate gave one")
    return caches
