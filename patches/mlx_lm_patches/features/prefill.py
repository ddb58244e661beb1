"""Seam: a chunk of prompts on upstream's batch path: rings are in order before it, and how long it takes is told. The sequential path tells it in its progress callback (see `progress`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ..runtime import Runtime
from ..seam import Seam
from .rings import put_in_order


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def prompt(self: Any, tokens: list[list[int]]) -> Any:
        if runtime.active and any(len(row) > 1 for row in tokens):
            put_in_order(self.prompt_cache)
        # Of several rows nobody can say what one of them took.
        if not (runtime.active and len(tokens) == 1 and len(self.tokens) == 1):
            return original(self, tokens)
        source = runtime.served_by(self.model)
        start, count = len(self.tokens[0]), len(tokens[0])
        began = time.perf_counter()
        result = original(self, tokens)
        if source is not None and count:
            runtime.prefilled(source, start, count, time.perf_counter() - began)
        return result

    return prompt


SEAMS = [
    Seam(
        feature="prefill",
        module="mlx_lm.generate",
        qualname="PromptProcessingBatch.prompt",
        kind="wrap",
        signature="(self, tokens)",
        bodies={"00f89ef82f148133": "0.32.0 0.32.1 0.32.2"},
        why="measures what prefilling costs, to tell whether restoring pays; puts rings in order, whose mask is wrong for padded rows otherwise",
        until="upstream reports the time of each prefill chunk, and its mask fits the ring that a chunk leaves",
        build=build,
    ),
]
