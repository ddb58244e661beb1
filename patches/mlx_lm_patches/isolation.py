"""What goes wrong in one request of a batch ends that request, not the generation thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mailbox import Mailbox


class Row:
    """One request in a batch. `failed(row)` is told of its first fault. Generation thread only."""

    def __init__(self, uid: int, mailbox: Mailbox, failed: Callable[[Row], None]):
        self.uid = uid
        self.mailbox = mailbox
        self.broken = False
        self.preempted = 0  # times that it has left the batch, to come back
        self._failed = failed

    def fail(self, error: Exception) -> None:
        """End the request with an error; its row goes at the end of the step."""
        if not self.broken:
            self.broken = True
            self.mailbox.fail(error)
            self._failed(self)

    def sampler(self, sample: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A sampler whose fault is the row's own: the row goes on greedily, for nobody, to the end of the step."""
        from mlx_lm.sample_utils import greedy_sampler

        if sample is greedy_sampler:
            return sample  # upstream samples rows that share it at once

        def guarded(logprobs: Any) -> Any:
            if not self.broken:
                try:
                    tokens = sample(logprobs)
                    if tokens.shape != logprobs.shape[:-1]:
                        raise ValueError(f"a sampler gave {tokens.shape} for {logprobs.shape}")
                    return tokens
                except Exception as error:
                    self.fail(error)
            return greedy_sampler(logprobs)

        guarded.__wrapped__ = sample  # type: ignore[attr-defined]
        return guarded

    def processor(self, process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A logits processor whose fault is the row's own."""

        def guarded(tokens: Any, logits: Any) -> Any:
            if not self.broken:
                try:
                    processed = process(tokens, logits)
                    if processed.shape != logits.shape:
                        raise ValueError(f"a logits processor gave {processed.shape} for {logits.shape}")
                    return processed
                except Exception as error:
                    self.fail(error)
            return logits

        return guarded


class Detokenizer:
    """A row's detokenizer whose fault is the row's own."""

    def __init__(self, inner: Any, row: Row):
        self._inner = inner
        self._row = row

    def add_token(self, token: int) -> None:
        self._try(lambda: self._inner.add_token(token))

    def finalize(self) -> None:
        self._try(self._inner.finalize)

    @property
    def last_segment(self) -> str:
        return self._try(lambda: self._inner.last_segment) or ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _try(self, call: Callable[[], Any]) -> Any:
        if self._row.broken:
            return None
        try:
            return call()
        except Exception as error:
            self._row.fail(error)
            return None
