"""Seams: an error in one request of a batch is answered to that request; the others go on unchanged.

Upstream catches errors of requests that it serves one at a time. In its batch loop
any error ends the generation thread, and with it every request, for good.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

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
                # Without a request since the last time it would only fail again.
                if engine is None or not runtime.active or self._stop or engine.delivered == seen:
                    raise
                seen = engine.delivered
                log.exception("the generation loop failed; it begins anew, the requests in it get the error")
                # The traceback holds the batch that failed.
                engine.fail_all(error.with_traceback(None))

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


def _seam(module: str, qualname: str, kind: str, signature: str, why: str, bodies: dict[str, str], build: Any = None) -> Seam:
    return Seam("isolation", module, qualname, kind, signature, bodies, why, UNTIL, build)


SEAMS = [
    _seam("mlx_lm.server", "BatchGenerator", "global", "", "keeps what goes wrong with a row to the row", {}, build_generator),
    _seam("mlx_lm.server", "ResponseGenerator._generate", "wrap", "(self)", "begins anew after an error that is no single row's", {}, build_generate),
    _seam("mlx_lm.server", "_make_sampler", "wrap", "(args, tokenizer)", "answers wrong arguments to their request", {}, build_part),
    _seam("mlx_lm.server", "_make_logits_processors", "wrap", "(args)", "answers wrong arguments to their request", {}, build_part),
    _seam(
        "mlx_lm.server", "ResponseGenerator._make_state_machine", "wrap", "(self, model_key, tokenizer, stop_words)",
        "answers wrong arguments to their request", {}, build_part,
    ),
    _seam("mlx_lm.tokenizer_utils", "TokenizerWrapper.detokenizer", "wrap", "(self)", "keeps what goes wrong with a row to the row", {}, build_detokenizer),
    _seam("mlx_lm.generate", "BatchGenerator._next", "check", "(self)", "decodes first, then prefills; reports in two lists", {}),
    _seam("mlx_lm.generate", "BatchGenerator._make_batch", "check", "(self, n)", "takes waiting sequences, then merges their caches", {}),
    _seam("mlx_lm.generate", "GenerationBatch", "check", "", "holds one item a row in every list", {}),
    _seam("mlx_lm.generate", "PromptProcessingBatch.extend", "check", "(self, batch)", "takes rows in", {}),
]  # fmt: skip
