"""Seam: a row that is alone in its batch gets the tokens of several steps in one, where a plugin's drafts of them were right.

Upstream takes a draft model only for requests that it serves one at a time. Here a
batch's decoding step asks first, and is upstream's own when nothing was drafted or
there are other rows. Between two steps everything is as upstream has it: the caches
hold the row's tokens and the next one is sampled. So rows may join and leave, end,
and be stored or kept as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import places, usage
from ..alone import AloneRow
from ..runtime import Runtime
from ..seam import Seam
from ..usage import SPECULATORS

UNTIL = "upstream speculates in batches"


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    speculation = runtime.speculation
    if speculation is None:
        return original

    @functools.wraps(original)
    def next(self: Any) -> Any:
        if len(self.uids) != 1 or not runtime.active:
            return original(self)
        row = AloneRow(self, _start(runtime, self.model))
        speculator = _speculator(self, row)
        if speculator is None:
            return original(self)
        responses = row.responses() if speculator.advance(row) else original(self)
        if not self.uids:
            usage.end(runtime, speculator)
        return responses

    def _speculator(batch: Any, row: AloneRow) -> Any:
        known = vars(batch).setdefault(SPECULATORS, {})
        uid = batch.uids[0]
        if uid not in known:
            # The rows before this one, which was with them or came when they had gone, are done.
            for before in known.values():
                if before is not None:
                    usage.end(runtime, before)
            known.clear()
            known[uid] = None
            try:
                known[uid] = speculation.begin(batch.model, row)
            except Exception as error:
                runtime.fault("beginning to speculate", error)
        return known[uid]

    return next


def _start(runtime: Runtime, model: Any) -> int:
    """The tokens at which the plugin's KV scheme converts a row's caches, between two steps; 0 when it does not."""
    scheme = runtime.scheme
    return scheme.start if scheme is not None and scheme.start > 0 and scheme.converts(model) else 0


SEAMS = [
    Seam(
        feature="speculation",
        module="mlx_lm.generate",
        qualname="GenerationBatch.next",
        kind="wrap",
        signature="(self)",
        bodies={"c2ffba532a96df18": "0.32.0 0.32.1 0.32.2"},
        why="emits drafted tokens that the model would have sampled itself",
        until=UNTIL,
        build=build,
    ),
    Seam(
        feature="speculation",
        **places.GENERATION_BATCH,
        kind="check",
        why="samples, counts and ends a row as `alone` does for several positions",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        **places.GENERATE_STEP,
        kind="check",
        why="samples, counts and looks at its history as `sequence` does",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        module="mlx_lm.sample_utils",
        qualname="make_sampler",
        kind="check",
        signature="(temp=, top_p=, min_p=, min_tokens_to_keep=, top_k=, xtc_probability=, xtc_threshold=, xtc_special_tokens=)",
        bodies={"1b0a121e55493e8b": "0.32.0 0.32.1 0.32.2"},
        why="its samplers draw in their last step, which `drawing` exchanges for the probabilities",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        module="mlx_lm.sample_utils",
        qualname="categorical_sampling",
        kind="check",
        signature="(logits, temp)",
        bodies={"a1caefb88ac987e6": "0.32.0 0.32.1 0.32.2"},
        why="draws from what `drawing` computes",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        **places.SERVER_LOOP,
        kind="check",
        why="answers each of a step's responses in order, several of one row too",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        module="mlx_lm.server",
        qualname="APIHandler.validate_model_parameters",
        kind="check",
        signature="(self)",
        bodies={"e5fde0e0a5df60e6": "0.32.0", "cba98a6cd849eb74": "0.32.1 0.32.2"},
        why="checks `num_draft_tokens`, of the body or the command line, before it is handed on",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        module="mlx_lm.server",
        qualname="APIHandler.generate_response",
        kind="check",
        signature=(
            "(self, text, finish_reason, prompt_token_count=, completion_token_count=, prompt_cache_count=, token_logprobs=, "
            "top_tokens=, tokens=, tool_calls=, reasoning_text=)"
        ),
        bodies={"7e7d747facc2cb59": "0.32.0 0.32.1 0.32.2"},
        why="makes the usage of an answer that is not streamed",
        until=UNTIL,
    ),
    Seam(
        feature="speculation",
        module="mlx_lm.server",
        qualname="APIHandler.completion_usage_response",
        kind="check",
        signature="(self, prompt_token_count=, completion_token_count=, prompt_cache_count=)",
        bodies={"b4a49e0b5cd22e55": "0.32.0 0.32.1 0.32.2"},
        why="makes the usage of a streamed answer",
        until=UNTIL,
    ),
]
