"""Requests that are held back while what they need is read, so that those being served go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm_hooks.types import ModelSource, Preparation

from . import checkpointing
from .mailbox import Cancelled
from .runtime import Runtime

_TOKENIZED = "_mlx_lm_patches_tokenized"

Delivery = tuple[Any, Any, Any]  # as upstream queues a request: where to put responses, the request, its arguments


class Held:
    """The requests that wait, in order. Generation thread only, but for `len`."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._waiting: list[tuple[Delivery, Preparation]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: Delivery, preparation: Preparation) -> None:
        self._waiting.append((delivery, preparation))

    def ready(self) -> tuple[Delivery, Preparation] | None:
        """The first that need wait no longer; those whose clients have gone are ended."""
        for item in list(self._waiting):
            delivery, preparation = item
            if delivery[0].cancelled:
                self._waiting.remove(item)
                self.let_go(preparation)
                delivery[0].put(Cancelled())
            elif self._may_go(preparation):
                self._waiting.remove(item)
                return item
        return None

    def let_go(self, preparation: Preparation) -> None:
        try:
            preparation.cancel()
        except Exception as error:
            self._runtime.fault("cancelling a preparation", error)

    def _may_go(self, preparation: Preparation) -> bool:
        try:
            return preparation.step()
        except Exception as error:
            self._runtime.fault("preparing a request", error)
            return True


def preparation_for(runtime: Runtime, generator: Any, request: Any, args: Any) -> Preparation | None:
    """What a request that upstream would add to its batch should wait for; None when nothing, or when it would not be added.

    Call it only when the model that `args` name is the one that is loaded.
    """
    provider = generator.model_provider
    if not hasattr(generator.prompt_cache, "prepare") or provider.model_key is None or not generator._is_batchable(args) or has_images(request.messages):
        return None
    if not getattr(type(generator)._tokenize, _TOKENIZED, False):
        return None
    try:
        result = generator._tokenize(provider.tokenizer, request, args)
    except Exception as error:  # upstream's to answer, when it asks
        setattr(request, _TOKENIZED, (provider.model_key, error))
        return None
    setattr(request, _TOKENIZED, (provider.model_key, result))
    source, prepare = runtime.source_for(provider.model_key), generator.prompt_cache.prepare
    restore = checkpointing.prepare(runtime, source, lambda: prepare(provider.model_key, result[0]))

    def hold() -> Preparation | None:
        tokens = checkpointing.goes_on_with(restore) or result[0]
        return _hold(runtime, source, tokens, args.max_tokens + len(result[0]) - len(tokens), 0 if runtime.preempts else None)

    return _behind(restore, hold)


def waits_for(runtime: Runtime, generator: Any, tokens: list[int], known: int, max_tokens: int, preempted: int) -> Preparation | None:
    """The same for a request that was `preempted` so often, and will fetch the first `known` tokens."""
    key = generator.model_provider.model_key
    restore = generator.prompt_cache.prepare(key, tokens[:known])
    return _behind(restore, lambda: _hold(runtime, runtime.source_for(key), tokens, max_tokens, preempted))


def _behind(restore: Preparation | None, hold: Callable[[], Preparation | None]) -> Preparation | None:
    return hold() if restore is None else Behind(restore, hold)


def _hold(runtime: Runtime, source: ModelSource, tokens: list[int], max_tokens: int, preempted: int | None) -> Preparation | None:
    try:
        return runtime.plugins.hold(source, tokens, max_tokens, preempted)
    except Exception as error:
        runtime.fault("holding a request", error)
        return None


class Behind:
    """A preparation, and what is found to be waited for once that is done: others have gone on meanwhile."""

    def __init__(self, first: Preparation, then: Callable[[], Preparation | None]):
        self._first = first
        self._then: Callable[[], Preparation | None] | None = then
        self._second: Preparation | None = None

    def step(self) -> bool:
        if self._then is not None:
            if not self._first.step():
                return False
            then, self._then = self._then, None
            self._second = then()
        return self._second is None or self._second.step()

    def cancel(self) -> None:
        self._then = None
        second, self._second = self._second, None
        try:
            self._first.cancel()
        finally:
            if second is not None:
                second.cancel()


def remembering(tokenize: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's `_tokenize`, which tokenizes a request for one model no second time: that changes its messages."""

    def remembered(generator: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        model, known = getattr(request, "__dict__", {}).pop(_TOKENIZED, (None, None))
        if known is None or model != generator.model_provider.model_key:
            return tokenize(generator, tokenizer, request, args)
        if isinstance(known, Exception):
            raise known
        return known

    return remembered


def mark(tokenize: Any) -> None:
    """Say of a replacement of `_tokenize` that it remembers."""
    setattr(tokenize, _TOKENIZED, True)


def has_images(messages: Any) -> bool:
    """Whether a request brings images, so that upstream serves it by itself."""
    import mlx_lm.server

    parts = getattr(mlx_lm.server, "_image_parts", None)  # 0.32.0 has no images
    return parts is not None and any(True for _ in parts(messages))
