"""Rows that leave a batch for want of room, and come back later where they were.

Between two steps a row's caches hold its tokens, and the next one is sampled
(`GenerationBatch._step`). A row that leaves becomes a batch of its own without caches:
those are stored like a finished request's, so that the plugin may keep them, on a disk
too, or let them go. It comes back as a request whose prompt is all its tokens: it waits
until there is room, what is stored of it is taken, the rest is computed, and the two
batches become one. Its next token, sampler, logits processors and stop sequences
were never touched, and its client's stream only pauses. A row that is still being
prefilled leaves and comes back as what upstream queues of a request.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from typing import Any

from mlx_lm_hooks.types import Admission, Preparation

from . import usage
from .admitting import INTERVAL, beside
from .isolation import Row
from .mailbox import Cancelled
from .parked import Decoding, Parked, Prefilling
from .runtime import Runtime

IDLE = 0.001  # seconds between two looks at what the only rows wait for, where nothing is decoded meanwhile
AGAIN = 0.1  # seconds after which a row that was refused is tried once more
SIGN = 5.0  # seconds between two signs of life to the client of a row that is away


class Return:
    """One row on its way back: waiting, then computing what was not stored."""

    def __init__(self, runtime: Runtime, generator: Any, engine: Any, parked: Parked):
        self._runtime, self._generator, self._engine = runtime, generator, engine
        self.parked = parked
        self._waits: Preparation | None = None
        self._batch: Any = None
        self._rest: list[int] = []
        self._again = 0.0
        self._wait()

    def step(self) -> bool:
        """Do one bounded piece, as upstream does of prompts between two steps. True when the row has joined. Raises Refused when it never will."""
        if self._batch is None:
            if time.monotonic() < self._again or not self._place() or (self._waits is not None and not self._waits.step()):
                return False
            if not self._begin():
                return False
            if self._batch is None:
                return True
        elif self._rest:
            size = self._generator.prefill_step_size
            chunk, self._rest = self._rest[:size], self._rest[size:]
            self._batch.prompt([chunk])
        if self._rest:
            return False
        self.parked.join(self._generator, self._batch)
        return True

    def cancel(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            self._engine.let_go(waits)

    def _wait(self) -> None:
        parked = self.parked
        self._waits = self._engine.waits_for(parked.tokens, parked.held + 1, parked.most, parked.times)

    def _place(self) -> bool:
        """Whether the batch takes another row."""
        generator = self._generator
        return len(generator._generation_batch) + len(generator._prompt_batch) < generator.completion_batch_size

    def _begin(self) -> bool:
        """Take what is stored, and be admitted. False when that was refused for now."""
        from mlx_lm.generate import make_prompt_cache

        generator, parked = self._generator, self.parked
        known = parked.tokens[: parked.held + 1]  # what is stored is one token shorter
        caches, rest = self._engine.fetch(known) if parked.held else (None, known)
        self.cancel()  # what was prepared is taken
        if caches is None:
            caches = make_prompt_cache(generator.model, generator.max_kv_size)
        cached = len(known) - len(rest)
        decoding, waiting = beside(generator)
        request = Admission(
            source=self._engine.source, model=generator.model, draft=None, tokens=parked.tokens, cached=cached, caches=caches,
            max_tokens=parked.most, step=generator.prefill_step_size, decoding=decoding, waiting=waiting, preempted=parked.times,
        )  # fmt: skip
        refused = self._runtime.plugins.admit(request)
        if refused is not None:
            if not decoding and not waiting:
                raise refused
            self._again = time.monotonic() + AGAIN
            self._wait()
            return False
        self._rest = parked.tokens[cached : parked.held]
        self._batch = parked.resume(generator, caches, cached)
        return True


class Preempting:
    """The rows of one `BatchGenerator` that have left it. `rows` are the server's requests, by uid."""

    def __init__(self, runtime: Runtime, generator: Any, engine: Any, rows: dict[int, Row]):
        self._runtime, self._generator, self._engine, self._rows = runtime, generator, engine, rows
        self._parked: list[Parked] = []  # the oldest first: rows leave the newest first, and come back the other way round
        self._return: Return | None = None
        self._granted = 0  # tokens that each row may get before the plugins are asked again
        self._among = 0  # rows that there were then: one that is alone may be drafted for, which takes more
        self._signed = 0.0

    @property
    def uids(self) -> list[int]:
        """The rows that are away."""
        return [parked.uid for parked in self._parked]

    def before_step(self) -> None:
        """Let rows leave until the others have room for a step; bring one back that was away."""
        import mlx.core as mx

        if self._among != len(self._generator._generation_batch):
            self._granted = 0
        if self._granted > 0 and not self._parked:
            return
        with mx.stream(self._generator._stream):
            if self._granted <= 0:
                self._make_room()
            if self._parked:
                self._bring_back()

    def after_step(self, prompts: Sequence[Any], responses: Sequence[Any]) -> None:
        """Count what each row may have got."""
        alone = bool(responses) and responses[0].uid == responses[-1].uid
        self._granted -= len(responses) if alone else bool(responses)
        if any(response.end_of_prompt for response in prompts):
            self._granted = 0

    def signs(self) -> list[Any]:
        """Now and then, upstream's responses of a prompt's progress for rows that are away: their streams get comments meanwhile, as they got before their first token."""
        from mlx_lm.generate import PromptProcessingBatch

        if not self._parked or time.monotonic() < self._signed + SIGN:
            return []
        self._signed = time.monotonic()
        return [PromptProcessingBatch.Response(parked.uid, (0, len(parked.tokens)), False, False) for parked in self._parked]

    def forget(self, uids: Sequence[int]) -> None:
        """These are served no more."""
        if self._return is not None and self._return.parked.uid in uids:
            self._stop_returning()
        self._parked = [parked for parked in self._parked if parked.uid not in uids]

    def _make_room(self) -> None:
        generator = self._generator
        batch = generator._generation_batch
        while any(uid in self._rows for uid in batch.uids):
            self._granted, self._among = self._room(batch.prompt_cache), len(batch)
            if self._granted > 0:
                return
            there = [*batch.uids, *generator._prompt_batch.uids, *(sequence[0] for sequence in generator._unprocessed_sequences)]
            newest = max(uid for uid in there if uid in self._rows)
            if self._return is not None and self._return.parked.uid > newest:
                self._stop_returning()
            else:
                self._leave(newest)

    def _room(self, caches: list[Any]) -> int:
        try:
            granted = self._runtime.plugins.room(caches)
        except Exception as error:
            self._runtime.fault("asking for room", error)
            return INTERVAL
        return INTERVAL if granted is None else granted

    def _leave(self, uid: int) -> None:
        import mlx.core as mx

        generator, row = self._generator, self._rows[uid]
        row.preempted += 1
        parked: Parked
        if uid in generator._generation_batch.uids:
            batch = generator._generation_batch
            index = batch.uids.index(uid)
            parked = Decoding(batch, index, row.preempted)
            role, tokens, caches = "assistant", batch.tokens[index][:], batch.extract_cache(index)
            usage.note(self._runtime, batch, row)
            vars(batch).get(usage.SPECULATORS, {}).pop(uid, None)
            batch.filter([at for at in range(len(batch.uids)) if at != index])
        elif uid in generator._prompt_batch.uids:
            batch = generator._prompt_batch
            index = batch.uids.index(uid)
            tokens, caches = batch.tokens[index][:], batch.extract_cache(index)
            role, segments = "user", generator._currently_processing.pop(index)[0]
            lists = (batch.samplers, batch.logits_processors, batch.stop_sequences)
            parked = Prefilling((uid, segments, batch.max_tokens[index], None, tokens, *(one[index] for one in lists)), row.preempted)
            batch.filter([at for at in range(len(batch.uids)) if at != index])
        else:
            role, batch, tokens, caches = "", None, [], []
            sequence = next(sequence for sequence in generator._unprocessed_sequences if sequence[0] == uid)
            generator._unprocessed_sequences.remove(sequence)
            parked = Prefilling(sequence, row.preempted)
            del sequence
        self._signed = self._signed if self._parked else time.monotonic()
        bisect.insort(self._parked, parked, key=lambda one: one.uid)
        if batch is not None:
            # What is left is a graph over the whole batch until it is computed.
            mx.eval([cache.state for cache in [*caches, *batch.prompt_cache]])
            if tokens:
                self._engine.keep(tokens, caches, role)

    def _stop_returning(self) -> None:
        returning, self._return = self._return, None
        if returning is not None:
            returning.cancel()

    def _bring_back(self) -> None:
        for parked in [parked for parked in self._parked if self._rows[parked.uid].mailbox.stopped]:
            self._end(parked, Cancelled())
        while self._parked:
            parked = self._parked[0] if self._return is None else self._return.parked
            try:
                if self._return is None:
                    self._return = Return(self._runtime, self._generator, self._engine, parked)
                if not self._return.step():
                    break
            except Exception as error:
                self._end(parked, error)
                continue
            # The next one is in line before others are.
            self._return = None
            self._parked.remove(parked)
            self._granted = min(self._granted, 1)
        generator = self._generator
        if self._parked and not (generator._generation_batch.uids or generator._prompt_batch.uids or generator._unprocessed_sequences):
            time.sleep(IDLE)

    def _end(self, parked: Parked, error: Exception) -> None:
        row = self._rows[parked.uid]
        self.forget([parked.uid])
        row.fail(error.with_traceback(None))
