"""Both tiers, the queue and its thread over a real directory, against a model of the contract.

The model: caches are a function of their tokens, so whatever is taken can be computed
anew and compared byte for byte. What must be found: everything that a flush reported
durable, and what was put since the last eviction; what may be lost: everything else.
With a cap that is reached only the contents are held to account.

A kill is a copy of the directory made between two system calls of the real code, or in
the middle of a write; the next process starts from it (see `support.disk`).

Run longer with ``MLX_LM_TIERED_EXAMPLES=1000 python -m pytest tests/prefix/test_state_machine.py``; with
``MLX_LM_TIERED_SHRINK=1`` a failure is made as short as may be.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_lm_hooks import ModelSource
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.cold.directory import Directory
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.settings import Settings
from support.disk import Disk
from support.token_caches import CUTTABLE, FAMILIES, Tokens, content, goes_on, make

# Real threads and files make shrinking slow, minutes for a failure.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if os.environ.get("MLX_LM_TIERED_SHRINK") else [])]
EXAMPLES = int(os.environ.get("MLX_LM_TIERED_EXAMPLES", "12"))
ROOMY = 64 << 20

def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Tiers(RuleBasedStateMachine):
    @initialize(
        family=st.sampled_from(sorted(FAMILIES)),
        cap=st.sampled_from([ROOMY, ROOMY, ROOMY, 160_000]),
        ram=st.sampled_from([ROOMY, 200_000, 30_000]),
        queue=st.sampled_from([ROOMY, 100_000]),
        writebehind=st.booleans(),
    )
    def begin(self, family: str, cap: int, ram: int, queue: int, writebehind: bool) -> None:
        self.family, self.cap, self.ram, self.queue, self.writebehind = family, cap, ram, queue, writebehind
        self.scratch = Path(tempfile.mkdtemp())
        model = self.scratch / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.source = ModelSource(path=model)
        self.places = 0
        self.root = self.scratch / "0"
        self.known: list[Tokens] = []
        self.durable: set[Tokens] = set()
        self.resident: set[Tokens] = set()  # in RAM
        self.put_here: set[Tokens] = set()  # in this process
        self.start()

    def start(self) -> None:
        """A process on the directory as it is."""
        self.resident, self.put_here = set(), set()
        self.disk = Disk(self.root).__enter__()
        options: dict[str, Any] = {"ssd_restore": "always"}
        options = {name: value for name, value in options.items() if name in {f.name for f in fields(Settings)}}
        self.runtime = Runtime(
            Settings(
                prompt_cache_bytes=self.ram, ssd_cache=self.root, ssd_cache_max=self.cap, ssd_cache_verify="always",
                ssd_queue=self.queue, ssd_demote_idle=0.0, writebehind=self.writebehind, **options,
            )
        )  # fmt: skip
        cache = self.runtime.prefix_cache(None, None, "server")
        assert cache is not None
        self.cache = cache
        self.runtime.model_loaded(self.source)
        assert self.runtime.storage is not None
        self.runtime.storage.queue.debounce = 0.0
        assert self.runtime.storage.identities.get(self.source, 30) is not None
        assert self.runtime.storage.store.wait_scanned(30)
        # Nothing of a process that ended is left, whenever it ended.
        assert not list((self.root / "tmp").iterdir()) and len(list((self.root / "writers").iterdir())) == 1
        self.ram_evictions = 0
        self.armed = False
        self.ssd_evictions = self.stats()["evictions"]
        if self.ssd_evictions:
            self.durable.clear()
        self.durable_at_kill: set[Tokens] = set()

    def stats(self) -> dict[str, Any]:
        assert self.runtime.storage is not None
        return self.runtime.storage.store.stats()

    def end(self) -> None:
        self.runtime.close()
        self.disk.__exit__(None, None, None)

    def teardown(self) -> None:
        if hasattr(self, "runtime"):
            try:
                self.check_everything()
            finally:
                self.end()
                shutil.rmtree(self.scratch)

    # What may happen

    @rule(data=st.data(), conversation=st.integers(0, 2), longer=st.integers(1, 24), fork=st.integers(0, 3), role=st.sampled_from(["assistant", "user"]))
    def put(self, data: st.DataObject, conversation: int, longer: int, fork: int, role: str) -> None:
        before: Tokens = data.draw(st.sampled_from(self.known)) if self.known and data.draw(st.booleans()) else ()
        if fork == 3 and before:
            before = before[: data.draw(st.integers(1, len(before)))]
        tokens = (*before, *(1000 * conversation + 100 * fork + i for i in range(len(before), len(before) + longer)))
        self.store(tokens, make(self.family, tokens), role)

    @rule(conversations=st.permutations(range(3)), longer=st.integers(8, 40))
    def put_several(self, conversations: list[int], longer: int) -> None:
        """More than a small tier or queue has room for."""
        for conversation in conversations:
            tokens = tuple(1000 * conversation + i for i in range(longer))
            self.store(tokens, make(self.family, tokens))

    def store(self, tokens: Tokens, caches: list[Any], role: str = "assistant") -> None:
        if len(tokens) <= 90:
            self.known.append(tokens)
            size = kinds.nbytes(caches)
            self.cache.put(self.source, list(tokens), caches, role=role)
            self.put_here.add(tokens)
            if size <= self.ram:
                self.resident.add(tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), more=st.integers(1, 10), other=st.integers(0, 2), put=st.booleans())
    def take(self, data: st.DataObject, more: int, other: int, put: bool) -> None:
        """A request: its prefix is looked up, the rest computed, and the longer sequence put."""
        known: Tokens = data.draw(st.sampled_from(self.known))
        known = known[: data.draw(st.integers(1, len(known)))] if data.draw(st.booleans()) else known
        query = (*known, *(5000 + 100 * other + i for i in range(more)))
        taken = self.look(query)
        if taken is not None and put and self.family in CUTTABLE:
            # In place, as a request does: what is stored must not change by it.
            goes_on(self.family, taken.caches, taken.length, query)
            assert content(taken.caches) == content(make(self.family, query))
            self.store(query, taken.caches)

    def look(self, query: Tokens) -> Any:
        taken = self.cache.take(self.source, list(query))
        length = taken.length if taken is not None else 0
        assert length < len(query)
        if taken is not None:
            assert content(taken.caches) == content(make(self.family, query[:length])), "wrong content"
        self.note_evictions()
        expected = max((self.usable(one, query) for one in self.durable | self.resident), default=0)
        assert length >= expected, f"{length} of {expected} tokens found"
        return taken

    def usable(self, stored: Tokens, query: Tokens) -> int:
        """How much of `query` an entry must serve at least; that a ring can be cut before it is full is not counted on."""
        shared = min(common(stored, query), len(query) - 1)
        return shared if self.family in CUTTABLE or shared == len(stored) else 0

    @rule(left=st.integers(0, 2))
    def evict(self, left: int) -> None:
        self.cache.trim(max_entries=left)

    @rule()
    def demote(self) -> None:
        assert self.cache.demotion is not None
        self.cache.demotion.due_now()
        self.turns(10)

    @rule(count=st.integers(1, 40))
    def turns(self, count: int) -> None:
        for _ in range(count):
            if not self.runtime.idle_turn():
                time.sleep(0.0005)

    @rule()
    def flush(self) -> None:
        if self.runtime.flush_on_this_thread(20):
            self.note_evictions()
            if self.cap == ROOMY:
                self.durable |= self.put_here
        else:
            assert self.disk.failed or not self.cap == self.queue == ROOMY, "a flush without a fault was not durable"

    @rule()
    def restart(self) -> None:
        """An end in order, flushed or not."""
        self.end()
        self.start()

    @precondition(lambda self: not self.armed)
    @rule(after=st.integers(1, 40))
    def kill_soon(self, after: int) -> None:
        self.armed = True
        self.places += 1
        self.disk.photograph(after, self.scratch / str(self.places), self.in_the_moment)

    def in_the_moment(self) -> None:
        evicted = self.stats()["evictions"] != self.ssd_evictions
        self.durable_at_kill = set() if evicted else set(self.durable)

    @precondition(lambda self: self.armed)
    @rule()
    def kill(self) -> None:
        """Go on from the moment of the kill; if that has not come, it is now."""
        self.disk.photograph_now()
        self.end()
        shutil.rmtree(self.root, ignore_errors=True)
        self.root = self.scratch / str(self.places)
        self.durable = set(self.durable_at_kill)
        self.start()

    @precondition(lambda self: not self.disk.failed)
    @rule(after=st.integers(1, 30), number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]))
    def fail_soon(self, after: int, number: int) -> None:
        self.disk.fail(after, number)

    # What must hold

    def note_evictions(self) -> None:
        if self.cache.ram.evictions != self.ram_evictions:
            self.ram_evictions = self.cache.ram.evictions
            in_ram = {entry.key for entry in self.cache.ram}
            self.resident = {tokens for tokens in self.resident if _key(tokens) in in_ram}
        if (evictions := self.stats()["evictions"]) != self.ssd_evictions:
            self.ssd_evictions = evictions
            self.durable.clear()
            if self.cap != ROOMY:
                self.resident.clear()  # demoted ones may be among them

    @invariant()
    def nothing_went_wrong(self) -> None:
        if not hasattr(self, "runtime"):
            return
        self.note_evictions()
        report = self.runtime.report()
        assert report["faults"] == {}, report["faults"]
        assert report["ssd"]["corrupt"] == report["ssd"]["quarantined"] == 0
        assert self.cache.ram.nbytes <= self.ram
        directory = Directory(self.root, self.cap)
        if self.cap != ROOMY:
            with self.disk.aside(), directory.locked():
                assert directory.usage() <= self.cap

    def check_everything(self) -> None:
        for tokens in sorted(set(self.known), key=len)[-12:]:
            self.look((*tokens, 9999))


def _key(tokens: Tokens) -> bytes:
    return np.array(tokens, ">i8").tobytes()


Tiers.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, phases=PHASES
)
test_tiers = Tiers.TestCase
