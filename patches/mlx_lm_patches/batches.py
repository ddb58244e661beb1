"""The server's `BatchGenerator`, in which a row may fail and leaves alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from mlx_lm_hooks.types import Refused

from . import usage
from .admitting import Watch, admit_row
from .checkpointing import rows
from .isolation import Row
from .preempting import Preempting
from .runtime import Runtime

log = logging.getLogger("mlx_lm_patches")


def build(original: type, runtime: Runtime) -> type:
    class BatchGenerator(original):
        """Upstream's generator. A fault of one row, or of the rows that one forward serves, is answered to them.

        Upstream lets go of a row in its table when its context was stopped and
        something is reported of it: so each row that failed is reported once more.
        """

        _uid_count: int
        _generation_batch: Any
        _prompt_batch: Any
        _currently_processing: list[Any]
        _engine: Any

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._engine = runtime.here.engine if runtime.active else None
            self._rows: dict[int, Row] = {}
            self._broken: list[int] = []  # failed, to be reported
            self._decoding = False  # whether a decoding step runs, or has failed
            self._decoded: list[Any] = []  # what it gave
            self._watch = Watch(runtime)
            self._preempting = Preempting(runtime, self, self._engine, self._rows)
            if self._engine is not None:
                self._watch_decoding()

        def insert_segments(self, *args: Any, **kwargs: Any) -> list[int]:
            mailbox = self._engine.current if self._engine is not None else None
            if mailbox is None or len(kwargs.get("samplers") or ()) != 1 or len(kwargs.get("logits_processors") or ()) != 1:
                return super().insert_segments(*args, **kwargs)
            row = Row(self._uid_count, mailbox, self._failed)
            self._rows[row.uid] = row
            try:
                if mailbox.ended:
                    raise ValueError("the request has failed before")
                if runtime.scheme is not None:
                    _make_caches(self, kwargs)
                admit_row(runtime, self, kwargs)
                kwargs["samplers"] = [row.sampler(sample) for sample in kwargs["samplers"]]
                kwargs["logits_processors"] = [[row.processor(p) for p in of_row or ()] for of_row in kwargs["logits_processors"]]
                uids = super().insert_segments(*args, **kwargs)
            except Exception as error:
                # Upstream goes on as if it had joined, until it is reported.
                self._uid_count = row.uid + 1
                row.fail(error)
                return [row.uid]
            self._engine.joining = row
            return uids

        def next(self) -> tuple[list[Any], list[Any]]:
            if self._engine is None:
                return super().next()
            self._decoding, self._decoded = False, []
            try:
                self._preempting.before_step()
                self._end_short()
                prompts, responses = super().next()
            except Exception as error:
                if self._engine.together:
                    raise  # the other ranks may have done this step
                log.exception("a step of the batch failed; the requests in it get the error")
                prompts, responses = [], self._after(error.with_traceback(None))
            for response in responses:
                if response.finish_reason is not None and response.uid not in self._broken:
                    if (row := self._rows.pop(response.uid, None)) is not None:
                        usage.note(runtime, self._generation_batch, row)
                    if (following := rows(self).pop(response.uid, None)) is not None:
                        following.end(True)  # in a step that failed later on
            self._preempting.after_step(prompts, responses)
            prompts = [*prompts, *self._preempting.signs()]
            if self._watch.due(prompts, responses):
                self._end_rows()
            return self._reported(prompts, responses) if self._broken else (prompts, responses)

        def remove(self, uids: Any, *args: Any, **kwargs: Any) -> Any:
            together = self._engine is not None and self._engine.together  # then only rank 0 knows that nobody waits
            self._keep([uid for uid in uids if (row := self._rows.get(uid)) is not None and not row.broken and (together or row.mailbox.stopped)])
            for uid in uids:
                if (row := self._rows.pop(uid, None)) is not None:
                    usage.note(runtime, self._generation_batch, row)
            if self._engine is not None:
                self._preempting.forget(uids)
            return super().remove(uids, *args, **kwargs)

        def _keep(self, uids: list[int]) -> None:
            """Store what was computed for requests that nobody waits for: the same prompt may come again."""
            try:
                for stage, index in self._find_uids(uids).values():
                    batch = (None, self._prompt_batch, self._generation_batch)[stage]
                    if batch is not None and batch.tokens[index]:
                        role = "user" if stage == 1 else "assistant"
                        self._engine.keep(batch.tokens[index][:], batch.extract_cache(index), role)
            except Exception as error:
                runtime.fault("keeping a cancelled prefill", error)

        def _end_rows(self) -> None:
            """End rows, the newest first, until the plugins let the others go on."""
            while (end := self._watch.ask(self)) is not None and end[0] in self._rows:
                self._end(*end)

        def _end_short(self) -> None:
            """End the rows for which the plugin's scheme has no room, so that the step of the others does not fail."""
            scheme, batch = runtime.scheme, self._generation_batch
            try:
                while scheme is not None and batch.uids and (short := scheme.short(batch.prompt_cache)) is not None:
                    self._end(batch.uids[short[0]], short[1])
            except Exception as error:
                runtime.fault("looking for room", error)

        def _end(self, uid: int, refused: Refused) -> None:
            """End a row that decodes; what it computed is stored."""
            import mlx.core as mx

            self._keep([uid])
            super().remove([uid])
            # What is left is a graph over the whole batch until it is computed.
            mx.eval([cache.state for cache in self._generation_batch.prompt_cache])
            self._rows[uid].fail(refused)

        def _failed(self, row: Row) -> None:
            if row.uid in self._rows:
                self._broken.append(row.uid)

        def _fail(self, uids: Iterable[int], error: Exception) -> None:
            for uid in list(uids):
                if uid in self._rows:
                    self._rows[uid].fail(error)

        def _reported(self, prompts: list[Any], responses: list[Any]) -> tuple[list[Any], list[Any]]:
            """The responses without those of rows that failed, and one for each such row that makes upstream let go of it."""
            from mlx_lm.generate import PromptProcessingBatch

            gone, self._broken = self._broken, []
            super().remove(gone)
            self._preempting.forget(gone)
            for uid in gone:
                self._rows.pop(uid, None)
            ends = [PromptProcessingBatch.Response(uid, (0, 0), False, False) for uid in gone]
            return [r for r in prompts if r.uid not in gone] + ends, [r for r in responses if r.uid not in gone]

        def _watch_decoding(self) -> None:
            """Have what a decoding step gave at hand when a later part of the step fails: its rows have moved on."""
            batch = self._generation_batch
            setattr(batch, usage.ROWS, self._rows)

            def next() -> list[Any]:
                self._decoding = True
                self._decoded = responses = type(batch).next(batch)
                self._decoding = False
                return responses

            batch.next = next

        def _after(self, error: Exception) -> list[Any]:
            """End the rows that a failed step leaves undefined; returns what the step has decoded for the others."""
            from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

            decoding, prefilling = self._generation_batch, self._prompt_batch
            if self._decoding or not _whole(decoding, decoding.tokens, decoding._num_tokens, decoding._matchers):
                self._fail(decoding.uids, error)
                del decoding.next  # a cycle (`_watch_decoding`), which would keep the rows' caches until some garbage collection
                self._generation_batch = GenerationBatch.empty(self.model, self.sampler)
                self._watch_decoding()
                if _whole(prefilling, prefilling.tokens, self._currently_processing):
                    return []
            there = {*decoding.uids, *prefilling.uids, *self._preempting.uids, *(sequence[0] for sequence in self._unprocessed_sequences)}
            ended = {response.uid for response in self._decoded if response.finish_reason is not None}
            lost = [uid for uid in self._rows if uid not in there and uid not in self._broken and uid not in ended]
            self._fail(lost, error)  # between prefill and decoding
            if not lost or not _whole(prefilling, prefilling.tokens, self._currently_processing):
                self._fail(prefilling.uids, error)
                self._prompt_batch = PromptProcessingBatch.empty(self.model, self.sampler, prefill_step_size=self.prefill_step_size)
                self._currently_processing = []
            return self._decoded

        def _make_batch(self, n: int) -> Any:
            waiting, left = list(self._unprocessed_sequences)[:n], len(self._unprocessed_sequences) - n
            processing = len(self._currently_processing)
            try:
                return super()._make_batch(n)
            except Exception as error:
                if self._engine is None or self._engine.together:
                    raise
                from mlx_lm.generate import PromptProcessingBatch

                del self._currently_processing[processing:]
                while len(self._unprocessed_sequences) > left:
                    self._unprocessed_sequences.popleft()
                batch = PromptProcessingBatch.empty(self.model, self.sampler, prefill_step_size=self.prefill_step_size)
                if n == 1:
                    self._fail([waiting[0][0]], error.with_traceback(None))
                    return batch
                for sequence in waiting:  # who of them it was
                    self._unprocessed_sequences.appendleft(sequence)
                    batch.extend(self._make_batch(1))
                return batch

    BatchGenerator.__qualname__ = original.__qualname__
    BatchGenerator.__module__ = original.__module__
    runtime.preempts = True
    return BatchGenerator


def _make_caches(generator: Any, call: dict[str, Any]) -> None:
    """Make the caches of a new sequence as upstream would a moment later, so that admission sees them."""
    from mlx_lm.generate import make_prompt_cache

    given = call.get("caches")
    if given is not None and any(caches is None for caches in given):
        call["caches"] = [make_prompt_cache(generator.model, generator.max_kv_size) if caches is None else caches for caches in given]


def _whole(batch: Any, *lists: Any) -> bool:
    """Whether every list has one item for each of the batch's rows."""
    return all(len(one) == len(batch.uids) for one in lists)


