"""Admission by blocks: a request is prefilled when the blocks of its prompt and of the beginning of its reply are free or can be made so.

They are promised to it then. Before a row has used them up it is promised more; where there are none, the row that
joined last leaves the batch, and comes back when there is room, the first in line and promised twice as much as before.
Rows leave the newest first and come back the oldest first, so each ends. A request that cannot leave is promised its longest reply, and
never runs out of blocks. What waits holds nothing. Generation thread only, but for `report`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mlx_lm_hooks import Admission, Refused

from .pool import RETRY_AFTER, PoolExhausted
from .scheme import Holds, Pages, rows_of, storage_of
from .table import Storage, Table

# Seconds that a request waits at most.
PATIENCE = 120.0
# Between two looks at what could be made free: so many times as long as the last one took, and no less than so many seconds.
LOOK_AGAIN, LEAST = 20, 0.005
# Tokens of a reply that nothing bounds: more are taken as they come.
UNBOUNDED = 256
# Tokens of a reply that are promised at first where a row can leave the batch, and later at a time.
FIRST, GROWTH = 128, 64
# Tokens of a batch that may be decoded before it is looked at again.
LOOK = 256


class Blocks:
    """`entries()` are the stored prefixes whose blocks can be made free; `make_room(enough, choose)` frees, until enough, those that `choose` picks one by one, as long as it picks any.

    `lender(source, tokens)` is the stored prefix that a request will share blocks with, and of how many tokens.
    """

    def __init__(
        self,
        pages: Pages,
        entries: Callable[[], Iterable[Holds]],
        make_room: Callable[[Callable[[], bool], Callable[[Sequence[Any]], Any]], bool],
        lender: Callable[[Any, Sequence[int]], tuple[Holds, int] | None],
        clock: Callable[[], float] = time.monotonic,
        drafts: int = 0,
    ):
        self._pages = pages
        self._drafts = drafts  # tokens that a step may write beside those it keeps
        self._entries, self._make_room, self._lender, self._clock = entries, make_room, lender, clock
        self._line: deque[Waiting] = deque()  # in the order they came
        self._counts: Counter[str] = Counter()
        self._look_at = 0.0
        pages.relieve = self._relieve

    def wait(self, source: Any, tokens: Sequence[int], max_tokens: int, preempted: int | None = None) -> Waiting | None:
        """What a request waits for; None where its model is not paged, where it fits and nobody waits, or where it never will fit: `admit` refuses it."""
        storage = self._pages.storages.get(source.path)
        if storage is None:
            return None
        if storage.blocks_for(longest(len(tokens), max_tokens)) > storage.pool.total:
            return None
        waiting = Waiting(self, source, tokens, max_tokens, preempted)
        if (preempted or not self._line) and self._fits(waiting):
            return None
        if preempted:
            self._line.appendleft(waiting)
            self._look_at = 0.0
        else:
            self._line.append(waiting)
            self._counts["waits"] += 1
        return waiting

    def admit(self, request: Admission) -> Refused | None:
        """Promise a request its blocks. None when that is done; else what to tell its client."""
        found = storage_of(request.caches)
        if found is None:
            return None
        storage, table = found
        pool, tokens = storage.pool, longest(len(request.tokens), request.max_tokens)
        first = promised(len(request.tokens), request.max_tokens, request.preempted)
        if storage.blocks_for(tokens) > pool.total:
            self._counts["refused_400"] += 1
            return Refused(
                400,
                f"the prompt of {len(request.tokens)} tokens and a reply of {tokens - len(request.tokens)} take {storage.blocks_for(tokens)} blocks of "
                f"{storage.block} tokens, more than the {pool.total} of the pool (--paged-kv-pool)",
            )

        def copies() -> int:  # fewer once what shares them has made room
            return _forks(storage, table, request.cached)

        def need() -> int:
            return storage.blocks_for(first) - len(table.blocks) + copies()

        # Nothing is let go where all of it would not be enough.
        if pool.available < need() <= pool.available + copies() + len(self._idle_blocks(storage)):
            self._make_room(lambda: pool.available >= need(), self._choosing(storage, lambda held: copies() > 0 and held.blocks[-1:] == table.blocks[-1:]))
        try:
            table.reserve(need(), copies(), storage.blocks_for(tokens) - storage.blocks_for(first))
        except PoolExhausted as error:
            self._counts["refused_503"] += not request.preempted  # else it is tried again
            return Refused(
                503,
                f"no blocks at the moment: the request needs {error.needed} blocks of {storage.block} tokens, and {error.free} of the pool's {error.total} "
                "can be had (--paged-kv-pool); try again later",
                RETRY_AFTER,
            )
        return None

    def room(self, caches: Sequence[Any]) -> int | None:
        """Of a batch's rows how many tokens each may get until this is asked again, all of them promised; 0 when the newest must leave. None where the batch is not paged."""
        if (tables := rows_of(caches)) is None:
            return None
        # Only a row that is alone is drafted for.
        rooms = [self._room(table, self._drafts if len(tables) == 1 else 0, len(tables)) for table in tables]
        if 0 in rooms:
            self._counts["preempted"] += 1
        return min(rooms)

    def report(self) -> dict[str, Any]:
        """For `/stats`. Any thread."""
        return {
            **self._pages.report(),
            "preempted": self._counts["preempted"],
            "waiting": len(self._line),
            "waits": self._counts["waits"],
            "refused_400": self._counts["refused_400"],
            "refused_503": self._counts["refused_503"],
        }

    # Of those that wait

    def may_go(self, waiting: Waiting) -> bool:
        """Whether the first in line fits, or has waited long enough, or for nothing: `admit` decides then."""
        if not self._line or self._line[0] is not waiting:
            return waiting not in self._line
        now = self._clock()
        if now < waiting.until:
            if now < self._look_at:
                return False
            stays = not self._fits(waiting) and not self._idle(waiting)
            after = self._clock()
            self._look_at = after + max(LEAST, LOOK_AGAIN * (after - now))
            if stays:
                return False
            self._look_at = 0.0  # the next in line may fit as well
        self.leave(waiting)
        return True

    def leave(self, waiting: Waiting) -> None:
        if waiting in self._line:
            self._line.remove(waiting)

    # Inside

    def _fits(self, waiting: Waiting) -> bool:
        storage = self._pages.storages.get(waiting.source.path)
        if storage is None:
            return True  # its model has gone, and comes back with all its blocks
        need = storage.blocks_for(promised(len(waiting.tokens), waiting.max_tokens, waiting.preempted))
        available = storage.pool.available
        if need <= available:
            return True
        shared: set[int] = set()
        lent = self._lender(waiting.source, waiting.tokens)
        if lent is not None and (found := storage_of(lent[0].caches)) is not None and found[0] is storage:
            shared = set(found[1].blocks[: lent[1] // storage.block])
        return need - len(shared) <= available + len(self._idle_blocks(storage) - shared)

    def _idle_blocks(self, storage: Storage) -> set[int]:
        """Blocks that only stored prefixes hold."""
        tables = {id(table): table for _, table in _tables(storage, self._entries())}
        held = Counter(block for table in tables.values() for block in table.blocks)
        return {block for block, holders in zip(held, storage.pool.counts(held), strict=True) if holders == held[block]}

    def _choosing(self, storage: Storage, otherwise: Callable[[Table], bool]) -> Callable[[Sequence[Any]], Any]:
        """Of stored prefixes, the least recently used first, which goes next: one that has blocks of its own, else one of several
        that nobody else shares blocks with, else one whose table is as `otherwise` says. The others' blocks would stay where they are."""
        idle: set[int] | None = None

        def choose(entries: Sequence[Any]) -> Any:
            nonlocal idle
            held = list(_tables(storage, entries))
            for entry, table in held:
                if storage.pool.sole(table.blocks):
                    return entry
            idle = self._idle_blocks(storage) if idle is None else idle
            for entry, table in held:
                if not idle.isdisjoint(table.blocks):
                    return entry
            return next((entry for entry, table in held if otherwise(table)), None)

        return choose

    def _room(self, table: Table, drafts: int, rows: int) -> int:
        """Tokens that one of several rows may get beside `drafts`, after it was promised more where it is short; 0 where nothing is left to promise."""
        reservation, pool = table.reservation, table.storage.pool
        if reservation is None:
            return LOOK
        if reservation.more <= 0:
            drafts = 0  # all was promised; only a copy that nobody foresaw can be missing
        while table.room <= drafts:
            if pool.available < 1:
                self._relieve(table.storage, 1 - pool.available, False)
            try:
                reservation.add(min(table.storage.blocks_for(GROWTH), max(1, reservation.more), max(1, pool.available // rows)))
            except PoolExhausted:
                return 0
            drafts = drafts if reservation.more > 0 else 0
        return min(LOOK, table.room - drafts)

    def _idle(self, waiting: Waiting) -> bool:
        """Whether no request has any blocks."""
        storage = self._pages.storages[waiting.source.path]
        return storage.pool.reserved == 0 and storage.pool.used == len(self._idle_blocks(storage))

    def _relieve(self, storage: Storage, missing: int, last: bool) -> None:
        pool = storage.pool
        enough = pool.available + missing
        if last or missing <= len(self._idle_blocks(storage)):
            # The last ones free nothing, but who shares a block with them need not copy it any more.
            self._make_room(lambda: pool.available >= enough, self._choosing(storage, lambda table: last))


class Waiting:
    """The contract's `Preparation` of a request that waits for blocks. It holds no pool, which may go meanwhile with its model."""

    def __init__(self, blocks: Blocks, source: Any, tokens: Sequence[int], max_tokens: int, preempted: int | None):
        self.source, self.tokens, self.max_tokens, self.preempted = source, tokens, max_tokens, preempted
        # Who was admitted once, and has answered in part, waits as long as it takes.
        self.until = math.inf if preempted else blocks._clock() + PATIENCE
        self._blocks = blocks

    def step(self) -> bool:
        return self._blocks.may_go(self)

    def cancel(self) -> None:
        self._blocks.leave(self)


def longest(prompt: int, max_tokens: int) -> int:
    """Tokens of a request whose reply is as long as it may be. In a batch mlx-lm forwards the last one as well, as it hands it out."""
    return prompt + (max_tokens if max_tokens >= 0 else UNBOUNDED)


def promised(prompt: int, max_tokens: int, preempted: int | None) -> int:
    """Those of them that it is promised when it begins: all where it cannot leave, else the more the oftener it has left."""
    whole = longest(prompt, max_tokens)
    return whole if preempted is None else min(whole, prompt + (FIRST << min(preempted, 30)))


def _tables(storage: Storage, entries: Iterable[Holds]) -> Iterator[tuple[Any, Table]]:
    """Those with blocks of this pool, and their tables."""
    for entry in entries:
        if (found := storage_of(entry.caches)) is not None and found[0] is storage:
            yield entry, found[1]


def _forks(storage: Storage, table: Table, cached: int) -> int:
    """Blocks that a request copies before it writes: the last one of its prefix, where that is not full and others hold it."""
    return int(cached % storage.block != 0 and bool(table.blocks) and storage.pool.count(table.blocks[-1]) > 1)
