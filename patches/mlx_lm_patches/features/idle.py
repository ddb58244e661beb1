"""Seam: idle turns of the generation thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import places
from ..engine import ENGINE, Engine
from ..ranked import RankedEngine
from ..runtime import Runtime
from ..seam import Seam


def build_init(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Before upstream's own: that starts the generation thread.
        if runtime.active:
            engine = Engine(self, runtime) if runtime.ranks is None else RankedEngine(self, runtime, runtime.ranks)
            try:
                engine.start()
                setattr(self, ENGINE, engine)
            except Exception as error:
                runtime.fault("starting the engine", error)
        original(self, *args, **kwargs)

    return __init__


def build_next_request(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def _next_request(self: Any, timeout: float | None = None) -> Any:
        engine = getattr(self, ENGINE, None)
        if engine is None or not runtime.active:
            return original(self, timeout)
        return engine.next_request(original, timeout)

    return _next_request


SEAMS = [
    Seam(
        feature="idle",
        module="mlx_lm.server",
        qualname="ResponseGenerator.__init__",
        kind="wrap",
        signature="(self, model_provider, prompt_cache)",
        bodies={"03168af51c0843ef": "0.32.0 0.32.1 0.32.2"},
        why="announces the engine before the generation thread starts",
        until="upstream announces its start",
        build=build_init,
    ),
    Seam(
        feature="idle",
        module="mlx_lm.server",
        qualname="ResponseGenerator._next_request",
        kind="wrap",
        signature="(self, timeout=)",
        bodies={"ee49c63f0c344343": "0.32.0 0.32.1 0.32.2"},
        why="runs one bounded unit of background work where the thread would wait for a request",
        until="upstream calls back when idle",
        build=build_next_request,
    ),
    Seam(
        feature="idle",
        **places.SERVER_LOOP,
        kind="check",
        why="waits with a timeout exactly when nothing decodes",
        until="upstream calls back when idle",
    ),
]
