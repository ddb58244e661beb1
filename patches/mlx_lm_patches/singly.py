"""Checkpoints of a generation that runs by itself (`stream_generate`), and going on from one.

While a token is handed out, the caches hold it and all before, and the next one is
sampled (`generate_step`), as in a batch. Here the sampler's random numbers are the
request's own, so the state they come from is kept as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_lm_hooks.types import GenerationState

from .checkpointing import Following, Replayed, matcher
from .progress import with_history
from .runtime import Runtime


def stream(following: Following, runtime: Runtime, original: Callable[..., Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What `original(**kwargs)` yields, kept every so many tokens; after what was emitted before an interruption, if there was one."""
    completed = False
    stops = matcher(kwargs["tokenizer"], following.args.stop_words)
    sampler = kwargs["sampler"] = Remembers(kwargs["sampler"])
    emitted = list(following.replay)
    state, following.state = following.state, None
    try:
        if state is not None:
            detokenizer = kwargs["tokenizer"].detokenizer
            for token in emitted:
                detokenizer.add_token(token)
                completed = stops.advance(token)
                yield _response(token, detokenizer.last_segment, len(following.prompt))
            _go_on(state, len(emitted), detokenizer, kwargs)
        for response in original(**kwargs):
            emitted.append(response.token)
            following.emitted += 1
            completed = stops.advance(response.token) or response.finish_reason is not None
            yield response
            if not completed and following.due() and runtime.active:
                try:
                    _save(following, emitted, sampler, kwargs)
                except Exception as error:
                    runtime.fault("taking a checkpoint", error)
    finally:
        following.end(completed)


class Remembers:
    """A sampler that knows what it sampled last: the token that is forwarded while the one before is emitted."""

    def __init__(self, sampler: Callable[[Any], Any]):
        self._sampler = sampler
        self.last: Any = None

    def __call__(self, logprobs: Any) -> Any:
        self.last = self._sampler(logprobs)
        return self.last


def _save(following: Following, emitted: Sequence[int], sampler: Remembers, kwargs: dict[str, Any]) -> None:
    import mlx.core as mx

    pending = int(sampler.last.item())
    if pending in kwargs["tokenizer"].eos_token_ids:
        return  # the next token ends it
    state: Any = mx.random.state
    high, low = state[0].tolist()
    tokens = [*following.prompt, *emitted]
    following.save(GenerationState(tokens, pending, kwargs["prompt_cache"], following.context, (high, low)))


def _go_on(state: GenerationState, emitted: int, detokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Change the arguments of a generation from its prompt to those of one that goes on from `state`."""
    import mlx.core as mx

    # The caller stores this very list afterwards.
    kwargs["prompt_cache"][:] = state.caches
    kwargs["prompt"] = [state.pending]
    kwargs["max_tokens"] -= emitted
    kwargs["tokenizer"] = _speaking(kwargs["tokenizer"], detokenizer)
    if kwargs.get("logits_processors"):
        history = mx.array(state.tokens[state.context :])
        kwargs["logits_processors"] = [with_history(processor, history) for processor in kwargs["logits_processors"]]
    if state.random is not None:
        # A seed is the random state itself, high half first (`mx.random.key`).
        mx.random.seed(state.random[0] << 32 | state.random[1])


def _speaking(tokenizer: Any, detokenizer: Any) -> Any:
    """The tokenizer with this detokenizer in place of new ones, so that text goes on where it was."""
    speaking = copy.copy(tokenizer)
    speaking.__class__ = type(type(tokenizer).__name__, (type(tokenizer),), {"detokenizer": property(lambda self: detokenizer)})
    return speaking


def _response(token: int, text: str, prompt: int) -> Any:
    from mlx_lm.generate import GenerationResponse

    return GenerationResponse(
        text=text,
        token=token,
        logprobs=Replayed(),
        from_draft=False,
        prompt_tokens=prompt,
        prompt_tps=0.0,
        generation_tokens=0,
        generation_tps=0.0,
        peak_memory=0.0,
    )
