"""A row that is alone in its batch, as a plugin's speculation sees it: what `GenerationBatch` does around a forward, for one row and several positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import asked
from .drawing import Drawing
from .usage import ROWS


class AloneRow(Drawing):
    """Implements the contract's `SpeculativeRow` over upstream's batch of one row."""

    _seeded = False  # upstream serves seeded requests outside batches

    def __init__(self, batch: Any, start: int = 0):
        """`start`: when the row holds that many tokens its caches are converted, so no step may go past it."""
        self._batch = batch
        self._start = start
        self._ahead: list[tuple[Any, Any]] = []  # sampled and not yet pending: token (1,) and log-probabilities (vocabulary)
        self._pending: int | None = None
        self._responses: list[Any] = []

    @property
    def tokens(self) -> Sequence[int]:
        return self._batch.tokens[0]

    @property
    def caches(self) -> list[Any]:
        return self._batch.prompt_cache

    @property
    def pending(self) -> int:
        if self._pending is None:
            self._pending = int(self._batch._next_tokens.item())
        return self._pending

    @property
    def draft_tokens(self) -> int | Literal["auto"] | None:
        row = vars(self._batch).get(ROWS, {}).get(self._batch.uids[0])
        return asked.drafts(row.mailbox.args) if row is not None else None

    @property
    def room(self) -> int:
        batch = self._batch
        room = batch.max_tokens[0] - batch._num_tokens[0] - 1
        before = self._start - len(batch.tokens[0])
        return min(room, before - 1) if before > 0 else room

    def sample(self, logits: Any, sampler: Callable[[Any], Any] | None = None) -> list[int]:
        import mlx.core as mx

        batch, context = self._batch, []
        if self._processors:
            context = [batch._token_context[0].update_and_fetch(batch._next_tokens)]
            for processor in self._processors:
                logits = processor(context[0], logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled = (sampler or self._sampler)(logprobs)
        rows = list(logprobs)
        mx.eval(sampled, rows, context)
        self._ahead = [(sampled[at : at + 1], row) for at, row in enumerate(rows)]
        return sampled.tolist()

    def emit(self) -> bool:
        batch = self._batch
        token, logprobs = self.pending, batch._next_logprobs[0]
        batch._current_tokens, batch._current_logprobs = batch._next_tokens, batch._next_logprobs
        following, following_logprobs = self._ahead.pop(0)
        batch._next_tokens, batch._next_logprobs = following, [following_logprobs]
        self._pending = None
        batch.tokens[0].append(token)
        batch._num_tokens[0] += 1
        reason = "length" if batch._num_tokens[0] >= batch.max_tokens[0] else None
        if batch._matchers[0].advance(token):
            reason = "stop"
        self._responses.append(batch.Response(batch.uids[0], token, logprobs, reason, None, None))
        return reason is not None

    def responses(self) -> list[Any]:
        """Upstream's responses for what was emitted, now that the caches hold exactly the row's tokens. A row that has ended leaves the batch."""
        if self._responses and self._responses[-1].finish_reason is not None:
            last = self._responses[-1]
            last.prompt_cache, last.all_tokens = self._batch.extract_cache(0), self._batch.tokens[0]
            self._batch.filter([])
        return self._responses

    @property
    def _sampler(self) -> Any:
        return (self._batch.samplers or [None])[0] or self._batch.fallback_sampler

    @property
    def _processors(self) -> Any:
        return (self._batch.logits_processors or [None])[0] or ()
