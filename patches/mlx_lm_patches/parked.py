"""Rows that are away from their batch: all that upstream keeps of them, without caches."""

from __future__ import annotations

from typing import Any, Protocol

_LISTS = ("uids", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences", "_token_context", "_num_tokens", "_matchers", "_next_logprobs")


class Parked(Protocol):
    """A row that has left `times` often.

    `tokens` is all that is known of it, `most` bounds what may come behind. Its caches held the first `held` of the tokens.
    """

    uid: int
    times: int
    tokens: list[int]
    held: int
    most: int

    def resume(self, generator: Any, caches: list[Any], cached: int) -> Any:
        """Go on with caches of the first `cached` tokens, at most `held`. Gives a batch of one that must have `tokens[cached:held]` as its prompt before it is handed to `join`; None when upstream does the rest."""

    def join(self, generator: Any, batch: Any) -> None:
        """Be a row of the generator's batch again."""


class Decoding:
    """One that was being decoded: a batch of its own. Its last token is sampled, and neither emitted nor in any cache."""

    def __init__(self, batch: Any, index: int, times: int):
        import mlx.core as mx

        self.batch = type(batch).empty(batch.model, batch.fallback_sampler)
        for name in _LISTS:
            setattr(self.batch, name, [getattr(batch, name)[index]])
        self.batch._next_tokens = batch._next_tokens[index : index + 1]
        mx.eval(self.batch._next_tokens, self.batch._next_logprobs)
        self.uid: int = self.batch.uids[0]
        self.times = times
        self.tokens: list[int] = [*self.batch.tokens[0], int(self.batch._next_tokens.item())]
        self.held = len(self.tokens) - 1
        self.most: int = self.batch.max_tokens[0] - self.batch._num_tokens[0] - 1

    def resume(self, generator: Any, caches: list[Any], cached: int) -> Any:
        from mlx_lm.generate import PromptProcessingBatch

        return PromptProcessingBatch(generator.model, [self.uid], [caches], [self.tokens[:cached]], generator.prefill_step_size)

    def join(self, generator: Any, batch: Any) -> None:
        self.batch.prompt_cache = batch.prompt_cache
        generator._generation_batch.extend(self.batch)


class Prefilling:
    """One whose prompt was not computed to its end: what upstream queues of a request. `sequence` is (uid, segments, max_tokens, caches, tokens held, …)."""

    def __init__(self, sequence: Any, times: int):
        self.uid, self._segments, self.most, _, held, *self._rest = sequence
        self.times = times
        self.held = len(held)
        self.tokens: list[int] = [*held, *(token for segment in self._segments for token in segment)]

    def resume(self, generator: Any, caches: list[Any], cached: int) -> Any:
        again = self.tokens[cached : self.held]
        segments = [list(segment) for segment in self._segments]
        if len(segments) == 1 and again:
            segments.insert(0, again)  # the last token is a segment by itself
        else:
            segments[0] = again + segments[0]
        generator._unprocessed_sequences.append((self.uid, segments, self.most, caches, self.tokens[:cached], *self._rest))
        return None

    def join(self, generator: Any, batch: Any) -> None:
        raise AssertionError("it joins as any other request does")
