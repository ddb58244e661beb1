"""Following one request's generation from its tokenization to its end, for checkpoints of it.

The server tokenizes a request, looks its prompt up, and starts to generate, all on
one thread without another request between. `asked` notes the first step, `begin` is
the second, and the third takes what it left in `runtime.here.following`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mlx_lm_hooks.types import CheckpointPreparation, GenerationState, ModelSource, Preparation, RequestCheckpoints

from .runtime import Runtime

# Where a batch generator has its followed rows.
ROWS = "_mlx_lm_patches_following"


class Asked(NamedTuple):
    """A request after its tokenization. `blocked` says why it can have no checkpoints, if so; `path` is ``batch`` or ``single``."""

    prompt: list[int]
    args: Any
    path: str
    blocked: str


class Following:
    """One request whose generation is followed. `emitted` counts its tokens, replayed ones included."""

    def __init__(
        self, runtime: Runtime, checkpoints: RequestCheckpoints, source: ModelSource, state: GenerationState | None, asked: Asked, interval: int
    ):
        self._runtime = runtime
        self._checkpoints = checkpoints
        self.source = source
        self.state = state
        self.prompt = list(asked.prompt)
        self.args = asked.args
        self.interval = interval
        self.context = state.context if state is not None else 0
        self.emitted = len(self.replay)

    @property
    def replay(self) -> list[int]:
        """The tokens that were emitted before the interruption, and the pending one."""
        state = self.state
        return [*state.tokens[len(self.prompt) :], state.pending] if state is not None else []

    def due(self) -> bool:
        """Whether a checkpoint is due after the token just emitted."""
        return self.emitted % self.interval == 0 and self.emitted + 1 < self.args.max_tokens

    def save(self, state: GenerationState) -> None:
        try:
            self._checkpoints.save(state)
        except Exception as error:
            self._runtime.fault("saving a checkpoint", error)

    def end(self, completed: bool) -> None:
        try:
            self._checkpoints.end(completed)
        except Exception as error:
            self._runtime.fault("ending a checkpointed request", error)


def asked(runtime: Runtime, generator: Any, args: Any, result: Any) -> None:
    """Note a request that was tokenized with `result`."""
    forget(runtime)
    if not runtime.active:
        return
    try:
        checkpoints = runtime.checkpoints()
        # A shorter reply than the interval never comes to a checkpoint.
        if checkpoints is None or args.max_tokens <= checkpoints.interval:
            return
        images = result[4] is not None
        path = "batch" if generator._is_batchable(args) and not images else "single"
        blocked = ""
        if args.logprobs or args.top_logprobs > 0:
            blocked = "logprobs"
        elif images:
            blocked = "images"
        elif generator.model_provider.draft_model is not None:
            blocked = "speculative"
        runtime.here.asked = Asked(result[0], args, path, blocked)
    except Exception as error:
        runtime.fault("preparing a checkpoint", error)


def prepare(runtime: Runtime, source: ModelSource, otherwise: Callable[[], Preparation | None]) -> Preparation | None:
    """What the request that was tokenized just now should wait for: its checkpoint, or when it has none, what `otherwise` gives."""
    request, runtime.here.asked = runtime.here.asked, None
    resumption = None
    if request is not None and not request.blocked:
        begin = getattr(runtime.checkpoints(), "prepare", None)
        try:
            resumption = begin(source, request.prompt, _policy(request)) if begin is not None else None
        except Exception as error:
            runtime.fault("looking for a checkpoint", error)
    return otherwise() if resumption is None else _Resumption(resumption, otherwise)


def goes_on_with(preparation: Preparation | None) -> list[int]:
    """The tokens of the checkpoint that a preparation, which is done, has found; none where it found none."""
    return preparation.tokens if isinstance(preparation, _Resumption) else []


class _Resumption:
    """Implements the contract's `Preparation`: a checkpoint's, and behind it the prompt's, where there turns out to be no checkpoint."""

    def __init__(self, checkpoint: CheckpointPreparation, otherwise: Callable[[], Preparation | None]):
        self._checkpoint = checkpoint
        self._otherwise: Callable[[], Preparation | None] | None = otherwise
        self._prompt: Preparation | None = None

    @property
    def tokens(self) -> list[int]:
        """What the request goes on with, once `step` gave True; none where it begins with its prompt."""
        return list(self._checkpoint.tokens) if self._checkpoint.found else []

    def step(self) -> bool:
        if self._otherwise is not None:
            if not self._checkpoint.step():
                return False
            otherwise, self._otherwise = self._otherwise, None
            if not self._checkpoint.found:
                self._prompt = otherwise()
        return self._prompt is None or self._prompt.step()

    def cancel(self) -> None:
        self._otherwise = None
        prompt, self._prompt = self._prompt, None
        try:
            self._checkpoint.cancel()
        finally:
            if prompt is not None:
                prompt.cancel()


def begin(runtime: Runtime, source: ModelSource, tokens: Sequence[int]) -> bool:
    """Before a prompt is looked up: begin to follow its generation. True when it goes on where it was interrupted, so that no prefix is needed."""
    request, runtime.here.asked = runtime.here.asked, None
    if request is None or list(tokens) != list(request.prompt):
        return False
    try:
        checkpoints = runtime.checkpoints()
        if checkpoints is None:
            return False
        if request.blocked:
            checkpoints.skipped(request.blocked)
            return False
        one = checkpoints.begin(source, request.prompt, _policy(request))
        if one is None:
            return False
        following = Following(runtime, one, source, one.state, request, checkpoints.interval)
        if following.state is not None and not _sound(following):
            following = Following(runtime, one, source, None, request, checkpoints.interval)
        runtime.here.following = following
        return following.state is not None
    except Exception as error:
        runtime.fault("looking for a checkpoint", error)
        return False


def resumed(runtime: Runtime) -> Following | None:
    """The request whose generation starts now, if it goes on where it was interrupted."""
    following = runtime.here.following
    return following if following is not None and following.state is not None else None


def take(runtime: Runtime, rest: Sequence[int]) -> Following | None:
    """The request whose generation starts now with `rest` of its prompt still to be forwarded."""
    following, runtime.here.following = runtime.here.following, None
    if following is None:
        return None
    if following.state is None:
        start = len(following.prompt) - len(rest)
        if not runtime.active or start < 0 or list(rest) != following.prompt[start:]:
            following.end(False)
            return None
        following.context = start
    return following


def matcher(tokenizer: Any, stop_words: Sequence[str]) -> Any:
    """A matcher of the request's stop sequences, as the server makes it."""
    from mlx_lm.generate import make_stop_sequences

    return make_stop_sequences(tokenizer, stop_words).matcher()


class Advanced:
    """Stop sequences whose matchers have read some tokens already."""

    def __init__(self, sequences: Any, tokens: Sequence[int]):
        self._sequences = sequences
        self._tokens = tokens

    def matcher(self) -> Any:
        made = self._sequences.matcher()
        for token in self._tokens:
            made.advance(token)
        return made


class Replayed:
    """In place of the log-probabilities of a token that was sampled in another process: asked for one, says 0."""

    def __getitem__(self, token: Any) -> Any:
        import mlx.core as mx

        return mx.array(0.0)


def forget(runtime: Runtime) -> None:
    """A request that was asked for and never came to generate is no longer followed."""
    here = runtime.here
    here.asked, following = None, here.following
    here.following = None
    if following is not None:
        following.end(False)


def _policy(request: Asked) -> str:
    """All that the client and the server's defaults say about the generation."""
    return json.dumps({"path": request.path, **dataclasses.asdict(request.args)}, sort_keys=True, default=str)


def _sound(following: Following) -> bool:
    """Whether a stored state is one that this request could have come to. It was read from a file."""
    state = following.state
    assert state is not None
    count = len(following.replay)
    return state.tokens[: len(following.prompt)] == following.prompt and 2 <= count < following.args.max_tokens


def rows(generator: Any) -> dict[int, Following]:
    """The followed rows of a batch generator, by uid."""
    return vars(generator).setdefault(ROWS, {})


def synthetic(response: type, uid: int, tokens: Sequence[int]) -> Iterator[Any]:
    """Upstream's responses for tokens that were emitted before."""
    for token in tokens:
        yield response(uid=uid, token=token, logprobs=Replayed(), finish_reason=None, prompt_cache=None, all_tokens=None)
