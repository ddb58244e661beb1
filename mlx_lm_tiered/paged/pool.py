"""Which blocks are free, and how many hold each of the others. Numbers only: what the blocks contain is in `arenas`.

A block's number is the same in every layer, so a request has one table, not one for
each layer, and sharing a prefix is counting each of its blocks once more.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mlx_lm_hooks import Refused

_FREE = re.compile(rb"\x01+")


RETRY_AFTER = 10  # seconds


class PoolExhausted(Refused):
    """More blocks were needed than there are: `needed`, of which `free` could be had, in a pool of `total`. Who asked for them is answered with 503."""

    def __init__(self, needed: int, free: int, total: int):
        super().__init__(503, f"{needed} blocks of KV were needed and {free} of {total} were free (--paged-kv-pool); try again later", RETRY_AFTER)
        self.needed, self.free, self.total = needed, free, total


class Pool:
    """`total` blocks. Blocks are taken and counted on the generation thread; `let_go` may be called on any thread, and from a garbage collection.

    Reserved blocks are free ones that are promised: only who has a reservation gets
    them. `relieve(missing)` is asked before a pool is exhausted, to have that many
    blocks let go; what holds tokens that nobody computes on belongs to the caller.
    """

    def __init__(self, total: int, relieve: Callable[[int], None] | None = None):
        if total < 1:
            raise ValueError("a pool needs at least one block")
        self.total = total
        self.relieve = relieve
        self._counts = [0] * total  # of the tables that hold each block
        self._free = bytearray(b"\x01" * total)  # the same, for finding runs
        # Freed last, taken first: (block, serial number of its freeing), of which those that a run has taken are passed over.
        self._stack = [(block, 0) for block in range(total - 1, -1, -1)]
        self._freed = [0] * total
        self._serial = 0
        self._left = total
        self._shared = 0
        self._reserved = 0
        self._back: deque[tuple[Sequence[int], int]] = deque()
        self._lock = threading.Lock()
        self.peak = 0  # most blocks in use at once

    # Any thread

    def let_go(self, blocks: Sequence[int], reserved: int = 0) -> None:
        """Give up one hold on each of `blocks`, and a reservation (below 0: have so many of them promised anew), at the next call that looks. Takes no lock, so that a collection within one may call it."""
        self._back.append((blocks, reserved))

    @property
    def free(self) -> int:
        """Blocks that nobody holds, reserved ones included."""
        return self._seen()[0]

    @property
    def used(self) -> int:
        """Blocks that are held; shared ones count once."""
        return self.total - self.free

    @property
    def shared(self) -> int:
        """Blocks with more than one holder."""
        return self._seen()[1]

    @property
    def reserved(self) -> int:
        """Free blocks that are promised."""
        return self._seen()[2]

    @property
    def available(self) -> int:
        """Free blocks that are not promised; below 0 where more is promised than is free."""
        free, _, reserved = self._seen()
        return free - reserved

    # Generation thread

    def count(self, block: int) -> int:
        """Holders of a block."""
        with self._lock:
            self._settle()
            return self._counts[block]

    def counts(self, blocks: Iterable[int]) -> list[int]:
        """The same of each of these."""
        with self._lock:
            self._settle()
            return [self._counts[block] for block in blocks]

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of these have one holder: what its going would free."""
        with self._lock:
            self._settle()
            return sum(self._counts[block] == 1 for block in blocks)

    def take(self, count: int, after: int | None = None, promised: int = 0) -> list[int]:
        """`count` blocks, each held once: behind block `after` where those are free, else in one run where there is one, else as they come.

        `promised` of them are the caller's by reservation, which is used up. Raises PoolExhausted, and then nothing was taken.
        """
        promised = min(promised, count)
        for relieved in (False, True):
            with self._lock:
                self._settle()
                had = self._left - self._reserved + promised
                if count <= min(had, self._left):
                    return self._given(count, after, promised)
            if relieved or self.relieve is None:
                break
            self.relieve(count - had)
        raise PoolExhausted(count, max(0, min(had, self._left)), self.total)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold each block, which somebody holds, once more."""
        with self._lock:
            self._settle()
            for block in blocks:
                if self._counts[block] == 0:
                    raise ValueError(f"block {block} is free and cannot be shared")
            for block in blocks:
                self._counts[block] += 1
                self._shared += self._counts[block] == 2

    def reserve(self, count: int) -> None:
        """Promise `count` free blocks. Raises PoolExhausted."""
        with self._lock:
            self._settle()
            if count > (available := self._left - self._reserved):
                raise PoolExhausted(count, max(0, available), self.total)
            self._reserved += count

    # Inside; the rest under the lock, as other threads that look settle as well

    def _given(self, count: int, after: int | None, promised: int) -> list[int]:
        blocks = self._behind(after, count) if after is not None else []
        if len(blocks) < count:
            blocks += self._run(count - len(blocks)) or self._last_freed(count - len(blocks))
        for block in blocks:
            self._counts[block] = 1
        self._reserved -= promised
        self.peak = max(self.peak, self.total - self._left)
        return blocks

    def _seen(self) -> tuple[int, int, int]:
        with self._lock:
            self._settle()
            return self._left, self._shared, self._reserved

    def _settle(self) -> None:
        while self._back:
            blocks, reserved = self._back.popleft()
            self._reserved -= reserved
            for block in blocks:
                self._drop(block)

    def _drop(self, block: int) -> None:
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is free and cannot be freed again")
        self._counts[block] -= 1
        self._shared -= self._counts[block] == 1
        if self._counts[block] == 0:
            self._left += 1
            self._free[block] = 1
            self._serial += 1
            self._freed[block] = self._serial
            self._stack.append((block, self._serial))

    def _taken(self, blocks: Sequence[int]) -> list[int]:
        for block in blocks:
            self._free[block] = 0
        self._left -= len(blocks)
        if len(self._stack) > 4 * self.total + 64:
            self._stack = [(block, freed) for block, freed in self._stack if self._free[block] and self._freed[block] == freed]
        return list(blocks)

    def _behind(self, after: int, count: int) -> list[int]:
        end = after + 1
        while end < self.total and end - after <= count and self._free[end]:
            end += 1
        return self._taken(range(after + 1, end))

    def _run(self, count: int) -> list[int]:
        """`count` blocks side by side out of the longest run of free ones; none where it is shorter.

        They begin in its middle where somebody's tokens end before it, so that both can
        grow: a table that is one ascending run is read without gathering.
        """
        longest = max(_FREE.finditer(self._free), key=lambda run: run.end() - run.start())
        start, end = longest.span()
        if end - start < count:
            return []
        if start > 0:
            start += (end - start - count) // 2
        return self._taken(range(start, start + count))

    def _last_freed(self, count: int) -> list[int]:
        blocks: list[int] = []
        while len(blocks) < count:
            block, freed = self._stack.pop()
            if self._free[block] and self._freed[block] == freed:
                blocks += self._taken([block])
        return blocks
