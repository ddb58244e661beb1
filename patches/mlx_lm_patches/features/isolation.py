"""Seams: an error in one request of a batch is answered to that request; the others go on unchanged.

Upstream catches errors of requests that it serves one at a time. In its batch loop
any error ends the generation thread, and with it every request, for good.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

from .. import places
from ..batches import build as build_generator
from ..isolation import Detokenizer
from ..runtime import Runtime
from ..seam import Seam

log = logging.getLogger("mlx_lm_patches")

UNTIL = "upstream answers an error in a batch to the request that has it"


def build_generate(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def _generate(self: Any) -> Any:
        seen = 0
        while True:
            try:
                return original(self)
            except Exception as error:
                engine = runtime.here.engine
                if engine is not None and engine.together:
                    engine.lost(error)
                    raise
                # Without a request since the last time it would only fail again.
                if engine is None or not runtime.active or self._stop or engine.delivered == seen:
                    raise
                seen = engine.delivered
                log.exception("the generation loop failed; it begins anew, the requests in it get the error")
                # The traceback holds the batch that failed.
                engine.fail_all(error.with_traceback(None))
            gc.collect()  # the batch is in cycles, and what it holds would stay until some later collection

    return _generate


def build_part(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """For what upstream makes of a request's arguments before the request joins the batch."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            engine = runtime.here.engine
            if engine is None or not runtime.active or engine.current is None:
                raise
            engine.current.fail(error)
            return Unmade(error)

    return make


class Unmade:
    """Stands for what could not be made of a request's arguments, until the request is let go."""

    def __init__(self, error: Exception):
        self._error = error

    def __iter__(self) -> Any:  # upstream unpacks (stop sequences, text state machine)
        return iter((self, None))

    def __call__(self, *args: Any) -> Any:
        raise self._error

    def matcher(self) -> Any:
        raise self._error


def build_detokenizer(original: property, runtime: Runtime) -> property:
    @functools.wraps(original.fget)  # type: ignore[arg-type]
    def detokenizer(self: Any) -> Any:
        made = original.fget(self)  # type: ignore[misc]
        engine = runtime.here.engine
        if engine is None or engine.joining is None:
            return made
        row, engine.joining = engine.joining, None
        return Detokenizer(made, row)

    return property(detokenizer)


SEAMS = [
    Seam(
        feature="isolation",
        module="mlx_lm.server",
        qualname="BatchGenerator",
        kind="global",
        signature=(
            "__init__(self, model, *, max_tokens=, stop_tokens=, sampler=, logits_processors=, completion_batch_size=, "
            "prefill_batch_size=, prefill_step_size=, max_kv_size=, stream=); stream(self); close(self); __del__(self); "
            "stats(self); insert(self, prompts, max_tokens=, caches=, all_tokens=, samplers=, logits_processors=, "
            "stop_sequences=); insert_segments(self, segments, max_tokens=, caches=, all_tokens=, samplers=, "
            "logits_processors=, stop_sequences=); _find_uids(self, uids); extract_cache(self, uids); remove(self, uids, "
            "return_prompt_caches=); prompt_cache_nbytes(self); _make_batch(self, n); _next(self); next(self); "
            "next_generated(self)"
        ),
        bodies={"9fdf85f989dfc63b": "0.32.0 0.32.1 0.32.2"},
        why="keeps what goes wrong with a row to the row; stores what cancelled rows have computed",
        until=UNTIL,
        build=build_generator,
    ),
    Seam(
        feature="isolation",
        **places.SERVER_LOOP,
        kind="wrap",
        why="begins anew after an error that is no single row's; forgets a row whose context was stopped",
        until=UNTIL,
        build=build_generate,
    ),
    Seam(
        feature="isolation",
        module="mlx_lm.server",
        qualname="_make_sampler",
        kind="wrap",
        signature="(args, tokenizer)",
        bodies={"a14b5d22fc992de9": "0.32.0 0.32.1 0.32.2"},
        why="answers wrong arguments to their request",
        until=UNTIL,
        build=build_part,
    ),
    Seam(
        feature="isolation",
        module="mlx_lm.server",
        qualname="_make_logits_processors",
        kind="wrap",
        signature="(args)",
        bodies={"2ddeba958073bd44": "0.32.0 0.32.1 0.32.2"},
        why="answers wrong arguments to their request",
        until=UNTIL,
        build=build_part,
    ),
    Seam(
        feature="isolation",
        module="mlx_lm.server",
        qualname="ResponseGenerator._make_state_machine",
        kind="wrap",
        signature="(self, model_key, tokenizer, stop_words)",
        bodies={"a1ee9b384f3fe040": "0.32.0 0.32.1 0.32.2"},
        why="answers wrong arguments to their request",
        until=UNTIL,
        build=build_part,
    ),
    Seam(
        feature="isolation",
        module="mlx_lm.tokenizer_utils",
        qualname="TokenizerWrapper.detokenizer",
        kind="wrap",
        signature="(self)",
        bodies={"c58d3ad472977541": "0.32.0 0.32.1 0.32.2"},
        why="keeps what goes wrong with a row's text to the row",
        until=UNTIL,
        build=build_detokenizer,
    ),
    Seam(
        feature="isolation",
        **places.GENERATION_BATCH,
        kind="check",
        why="holds one item a row in every list",
        until=UNTIL,
    ),
    Seam(
        feature="isolation",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch.extend",
        kind="check",
        signature="(self, batch)",
        bodies={"0236ef158cf7474b": "0.32.0 0.32.1 0.32.2"},
        why="takes rows in one by one",
        until=UNTIL,
    ),
]
