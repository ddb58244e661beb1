"""Seams: checkpoints of generations that run in a batch, and going on from them. `singly` does it for those outside.

After a step of a batch, a row's caches hold the prompt and all tokens that were
emitted, and the next token is sampled (`GenerationBatch._step`). A row that goes on is
inserted with those caches and that token as all that is left of its prompt: upstream
then forwards it and emits what comes after. What was emitted before, and the token,
go out through upstream's own responses first.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks.types import GenerationState

from .. import places
from ..checkpointing import ROWS, Advanced, Following, rows, synthetic, take
from ..runtime import Runtime
from ..seam import Seam


def build_insert(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def insert_segments(self: Any, segments: Any, max_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if runtime.here.following is None:
            return original(self, segments, max_tokens, *args, **kwargs)
        rest = [token for segment in segments[0] for token in segment] if len(segments) == 1 and not args else []
        following = take(runtime, rest)
        if following is None:
            return original(self, segments, max_tokens, *args, **kwargs)
        state = following.state
        if state is not None:
            segments = [[[state.pending]]]
            max_tokens = [max_tokens[0] - following.emitted]
            kwargs["caches"] = [state.caches]
            kwargs["all_tokens"] = [list(state.tokens)]
            kwargs["stop_sequences"] = [Advanced(kwargs["stop_sequences"][0], following.replay)]
        uids = original(self, segments, max_tokens, **kwargs)
        if ROWS not in vars(self):
            # A loop that begins anew after a fault lets go of the generator without a word.
            weakref.finalize(self, _abandon, rows(self))
        rows(self)[uids[0]] = following
        return uids

    return insert_segments


def build_next(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def next(self: Any) -> Any:
        followed = vars(self).get(ROWS)
        if not followed:
            return original(self)
        prompts, responses = original(self)
        replays: list[Any] = []
        for uid, following in followed.items():
            if following.state is not None:
                replays += synthetic(type(self._generation_batch).Response, uid, following.replay)
                following.state = None
        due: dict[int, Following] = {}
        for response in responses:
            following = followed.get(response.uid)
            if following is None:
                continue
            if response.finish_reason is not None:
                followed.pop(response.uid).end(True)
                due.pop(response.uid, None)
                continue
            following.emitted += 1
            if following.due():
                due[response.uid] = following
        for uid, following in due.items():
            # Of a row with several tokens in one step, when all are counted: its caches hold them all.
            try:
                _save(self, uid, following)
            except Exception as error:
                runtime.fault("taking a checkpoint of a row", error)
        return prompts, replays + responses

    return next


def _save(generator: Any, uid: int, following: Following) -> None:
    import mlx.core as mx

    batch = generator._generation_batch
    if uid not in batch.uids:
        return
    row = batch.uids.index(uid)
    with mx.stream(generator._stream):
        pending = int(batch._next_tokens[row].item())
        if copy.copy(batch._matchers[row]).advance(pending):
            return  # the next token ends it
        tokens = list(batch.tokens[row])
        if tokens[: len(following.prompt)] != following.prompt:
            raise ValueError("a row holds other tokens than its prompt")
        # A step that failed half-way may have reported some tokens past us.
        following.emitted = len(tokens) - len(following.prompt)
        following.save(GenerationState(tokens, pending, batch.extract_cache(row), following.context))


def _abandon(followed: dict[int, Following]) -> None:
    while followed:
        followed.popitem()[1].end(False)


def build_remove(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def remove(self: Any, uids: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, uids, *args, **kwargs)
        followed = vars(self).get(ROWS) or {}
        for uid in uids:
            if (following := followed.pop(uid, None)) is not None:
                following.end(False)
        return result

    return remove


SEAMS = [
    Seam(
        feature="checkpoints",
        module="mlx_lm.generate",
        qualname="BatchGenerator.insert_segments",
        kind="wrap",
        signature="(self, segments, max_tokens=, caches=, all_tokens=, samplers=, logits_processors=, stop_sequences=)",
        bodies={"e30f86bf1a4d9a48": "0.32.0 0.32.1 0.32.2"},
        why="lets a row go on where its generation was interrupted",
        until="upstream keeps generations",
        build=build_insert,
    ),
    Seam(
        feature="checkpoints",
        module="mlx_lm.generate",
        qualname="BatchGenerator.next",
        kind="wrap",
        signature="(self)",
        bodies={"b9eb1634a82d3a8e": "0.32.0 0.32.1 0.32.2"},
        why="keeps rows every so many tokens, and emits again what an interrupted one had emitted",
        until="upstream keeps generations",
        build=build_next,
    ),
    Seam(
        feature="checkpoints",
        module="mlx_lm.generate",
        qualname="BatchGenerator.remove",
        kind="wrap",
        signature="(self, uids, return_prompt_caches=)",
        bodies={"16335a4d0fa9f791": "0.32.0 0.32.1 0.32.2"},
        why="tells of rows that are given up",
        until="upstream keeps generations",
        build=build_remove,
    ),
    Seam(
        feature="checkpoints",
        **places.GENERATION_BATCH,
        kind="check",
        why="emits a token when it has forwarded it and sampled the next; drops the token that a row begins with",
        until="upstream keeps generations",
    ),
    Seam(
        feature="checkpoints",
        **places.SERVER_LOOP,
        kind="check",
        why="tokenizes, looks up and inserts a request at one go",
        until="upstream keeps generations",
    ),
]
