"""Seams: caches, conversion, batches and attention under a plugin's KV scheme. Without one nothing is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .. import places
from ..runtime import Runtime
from ..seam import Seam
from .loads import path_of


def build_caches(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    scheme = runtime.scheme
    if scheme is None:
        return original

    @functools.wraps(original)
    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> Any:
        caches = original(model, max_kv_size)
        return scheme.caches(model, path_of(model), caches) if runtime.active else caches

    return make_prompt_cache


def build_conversion(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Upstream asks after each chunk and each token whether to convert; `delayed` passes the scheme as the start where it is to."""
    scheme = runtime.scheme
    if scheme is None or scheme.start == 0:
        return original

    @functools.wraps(original)
    def maybe_quantize_kv_cache(prompt_cache: Any, quantized_kv_start: Any, kv_group_size: Any, kv_bits: Any) -> None:
        if quantized_kv_start is scheme:
            scheme.convert(prompt_cache)
        else:
            original(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)

    return maybe_quantize_kv_cache


def build_extend(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    scheme = runtime.scheme
    if scheme is None or scheme.start == 0:
        return original

    @functools.wraps(original)
    def _extend_cache(cache_a: Any, cache_b: Any) -> Any:
        if not cache_a or not cache_b or not runtime.active:
            return original(cache_a, cache_b)
        return scheme.extend(cache_a, cache_b)

    return _extend_cache


def build_next(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Rows are converted between steps, when they hold as many tokens as the scheme says; no chunk goes past that."""
    scheme = runtime.scheme
    if scheme is None or scheme.start == 0:
        return original

    @functools.wraps(original)
    def _next(self: Any) -> Any:
        if not runtime.active or not scheme.converts(self.model):
            return original(self)
        for sequence in self._unprocessed_sequences:
            if len(sequence[4]) >= scheme.start:
                scheme.convert(sequence[3])
        _convert_due(scheme, self._generation_batch)
        step = self.prefill_step_size
        try:
            self.prefill_step_size = min([step, *(rest for rest, next in _waiting(self, scheme.start) if rest < min(next, step))])
            result = original(self)
        finally:
            self.prefill_step_size = step
        _convert_due(scheme, self._prompt_batch)
        return result

    return _next


def _convert_due(scheme: Any, batch: Any) -> None:
    rows = [row for row, tokens in enumerate(batch.tokens) if len(tokens) == scheme.start]
    if rows:
        scheme.convert_rows(batch.prompt_cache, rows)


def _waiting(generator: Any, start: int) -> Iterator[tuple[int, int]]:
    """Of rows that are prefilled next and before the start: the tokens to the start, and those of the next segment."""
    for tokens, (segments, _, _) in zip(generator._prompt_batch.tokens, generator._currently_processing, strict=True):
        if len(tokens) < start and segments:
            yield start - len(tokens), len(segments[0])
    for sequence in generator._unprocessed_sequences:
        if len(sequence[4]) < start:
            yield start - len(sequence[4]), len(sequence[1][0])


def build_attention(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    return original if runtime.scheme is None else runtime.scheme.attention(original)


def build_dispatch(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Upstream tells by the layer's own cache; a layer that reads another layer's KV has none, and sinks are refused."""
    if runtime.scheme is None:
        return original
    from mlx_lm.models import base

    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        # Whether or not this activation is the one that is on: models keep the function that they imported.
        if hasattr(keys, "group_size"):
            more = {} if sinks is None else {"sinks": sinks}
            return base.quantized_scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, group_size=keys.group_size, bits=keys.bits, **more
            )
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


_UNTIL = "upstream batches quantized KV and takes its format from a plugin"
_MAKE: dict[str, Any] = dict(
    feature="schemes",
    qualname="make_prompt_cache",
    signature="(model, max_kv_size=)",
    bodies={"3a9e159587180a45": "0.32.0 0.32.1 0.32.2"},
    why="makes caches in the classes of the scheme",
    until=_UNTIL,
    build=build_caches,
)

SEAMS = [
    Seam(module="mlx_lm.models.cache", kind="wrap", **_MAKE),
    *(Seam(module=f"mlx_lm.{consumer}", kind="global", **_MAKE) for consumer in ("generate", "server", "chat")),
    Seam(
        feature="schemes",
        module="mlx_lm.models.base",
        qualname="quantized_scaled_dot_product_attention",
        kind="wrap",
        signature="(queries, q_keys, q_values, scale, mask, group_size=, bits=)",
        bodies={"ae85bee2d1603cc7": "0.32.0 0.32.1 0.32.2"},
        why="attends to quantized KV in tiles, to rows of different kinds, and with sinks",
        until=_UNTIL,
        build=build_attention,
    ),
    Seam(
        feature="schemes",
        module="mlx_lm.models.base",
        qualname="scaled_dot_product_attention",
        kind="wrap",
        signature="(queries, keys, values, cache, scale, mask, sinks=)",
        bodies={"a89017bce67b084d": "0.32.0 0.32.1 0.32.2"},
        why="knows quantized keys by themselves, for layers that read another layer's",
        until=_UNTIL,
        build=build_dispatch,
    ),
    Seam(
        feature="schemes",
        module="mlx_lm.generate",
        qualname="maybe_quantize_kv_cache",
        kind="wrap",
        signature="(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)",
        bodies={"5423a11e3a30b738": "0.32.0 0.32.1 0.32.2"},
        why="converts the caches of a request when the scheme starts",
        until=_UNTIL,
        build=build_conversion,
    ),
    Seam(
        feature="schemes",
        module="mlx_lm.generate",
        qualname="_extend_cache",
        kind="wrap",
        signature="(cache_a, cache_b)",
        bodies={"e2380f73d95e962d": "0.32.0 0.32.1 0.32.2"},
        why="joins rows that are quantized and rows that are not yet",
        until=_UNTIL,
        build=build_extend,
    ),
    Seam(
        feature="schemes",
        **places.BATCH_STEP,
        kind="wrap",
        why="converts rows when the scheme starts, and ends chunks there",
        until=_UNTIL,
        build=build_next,
    ),
    Seam(
        feature="schemes",
        module="mlx_lm.server",
        qualname="ResponseGenerator._is_batchable",
        kind="check",
        signature="(self, args)",
        bodies={"0b50356b0b637ce1": "0.32.0 0.32.1 0.32.2"},
        why="batches when upstream's own --kv-bits is not set, which a plugin that takes it over unsets",
        until=_UNTIL,
    ),
]
