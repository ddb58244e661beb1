"""Which blocks hold a request's tokens: one table for all its layers."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .arenas import Arenas, Run
from .pool import Pool, PoolExhausted
from .sides import Sides


class Remembered:
    """An array of numbers, made anew when they are others than the last ones."""

    def __init__(self) -> None:
        self._numbers: list[int] | None = None
        self._array: mx.array | None = None

    def __call__(self, numbers: list[int]) -> mx.array:
        if self._array is None or numbers != self._numbers:
            self._numbers, self._array = numbers, mx.array(numbers)
        return self._array


class Storage:
    """A pool, and what is in its blocks. `sides` has, for each of a model's caches, what its tokens look like where it is paged; without it all are.

    `attend(rows, queries, scale, mask, sinks)` is asked first for attention over several
    rows, and answers None for what it does not do. `padded` says that the model's
    attention must have arrays.
    """

    def __init__(self, pool: Pool, arenas: Arenas, sides: Sequence[Sides | None] | None = None):
        self.pool, self.arenas = pool, arenas
        self.sides = tuple(arenas.layers if sides is None else sides)
        self.attend: Callable[..., mx.array | None] | None = None
        self.padded = False
        # Layers ask for the same numbers one after the other.
        self.places, self.offsets = Remembered(), Remembered()
        self.padding: tuple[Any, mx.array] | None = None  # slots of padded rows, and what they were made of

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.arenas.block

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block)


class Reservation:
    """Blocks promised to a request, `copies` of them for blocks of others that it is known to copy; as it goes on it may need `more`.

    Tables of the same request share it; what was not used goes back with the last of them.
    """

    def __init__(self, pool: Pool, blocks: int, copies: int = 0, more: int = 0):
        self.left = 0
        self.more = more
        self.used = 0  # blocks that were taken and not given back
        self.copies = min(copies, blocks)
        self._pool = pool
        pool.reserve(blocks)
        self.left = blocks

    def take(self, count: int, after: int | None) -> list[int]:
        """`count` blocks, the promised ones first. Raises PoolExhausted."""
        promised = min(self.left, count)
        blocks = self._pool.take(count, after, promised)
        self.left -= promised
        self.used += promised
        return blocks

    def add(self, blocks: int) -> None:
        """Have so many more promised. Raises PoolExhausted."""
        self._pool.reserve(blocks)
        self.left += blocks
        self.more -= blocks

    def give_back(self, blocks: list[int]) -> None:
        """Give up a hold on each block. Those that are free then are promised again, as far as they were: drafts take blocks that are trimmed and taken again."""
        promised = min(self.used, self._pool.sole(blocks))
        self.used -= promised
        self.left += promised
        self._pool.let_go(blocks, -promised)

    def __del__(self) -> None:
        if self.left:
            self._pool.let_go((), self.left)


_versions = itertools.count()


class Table:
    """The blocks of one sequence, in order, and how many tokens each layer has in them. Generation thread only, but for its end.

    Layers write one after the other: the first that gets to a block takes it, the
    others find it there. A block that another table holds too is copied, in every
    layer, before the first write into it. `version` is another one whenever `blocks`
    are others, and no two tables have the same.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self.blocks: list[int] = []
        self._set([])
        self.lengths: list[int | None] = [None] * len(storage.arenas.layers)  # None: no cache is the layer's
        self.reservation: Reservation | None = None
        self._fork: weakref.ref[Table] | None = None
        self._forked_at: tuple[int, object] | None = None

    def __del__(self) -> None:
        if self.blocks:
            self.storage.pool.let_go(self.blocks)
            self.blocks = []

    def _set(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.version = next(_versions)
        self._breaks: list[int] | None = None

    @property
    def breaks(self) -> list[int]:
        """Places in `blocks` at which another run begins. Found once: every layer asks in every step."""
        if self._breaks is None:
            self._breaks = (np.flatnonzero(np.diff(self.blocks) != 1) + 1).tolist()
        return self._breaks

    def in_one_run(self, layer: int) -> bool:
        """Whether a layer's tokens lie one behind the other."""
        return not self.breaks or self.breaks[0] >= self.storage.blocks_for(self.length(layer))

    def length(self, layer: int) -> int:
        """Tokens that a layer has."""
        return self.lengths[layer] or 0

    def slots(self, start: int, stop: int) -> list[Run]:
        """Where the tokens from `start` to `stop` are, in as few runs as possible."""
        block, breaks = self.storage.block, self.breaks
        runs: list[Run] = []
        at, place = start, bisect_right(breaks, start // block)
        while at < stop:
            end = min(stop, breaks[place] * block) if place < len(breaks) else stop
            begins = self.slot(at)
            runs.append((begins, begins + end - at))
            at, place = end, place + 1
        return runs

    def slot(self, position: int) -> int:
        """Where one token is."""
        block = self.storage.block
        return self.blocks[position // block] * block + position % block

    def extend(self, layer: int, count: int) -> int:
        """Make room for `count` tokens behind a layer's, in blocks that no other table holds; the layer then has them. Returns where they begin.

        Raises PoolExhausted; then the layer has what it had.
        """
        start = self.length(layer)
        self._room(start, start + count)
        self.lengths[layer] = start + count
        return start

    def make_room(self, count: int) -> None:
        """The same ahead, behind the tokens that there are: no layer has them yet. Raises PoolExhausted."""
        start = max(length or 0 for length in self.lengths)
        self._room(start, start + count)

    def trim(self, layer: int, count: int) -> int:
        """Take a layer's last tokens away, `count` or as many as it has; blocks that no layer needs are freed. Returns how many."""
        held = self.length(layer)
        count = min(count, held)
        self.lengths[layer] = held - count
        self._fork = None
        keep = self.storage.blocks_for(max(length or 0 for length in self.lengths))
        if keep < len(self.blocks):
            gone = self.blocks[keep:]
            self._set(self.blocks[:keep])
            if self.reservation is not None:
                self.reservation.give_back(gone)
            else:
                self.storage.pool.let_go(gone)
        return count

    def share(self, other: Table, length: int) -> None:
        """Begin with the blocks of another table's first `length` tokens, of which no layer has any yet."""
        blocks = other.blocks[: self.storage.blocks_for(length)]
        self.storage.pool.share(blocks)
        self._set(blocks)

    def fork(self, layer: int, length: int, key: object = None) -> Table:
        """A table that shares the blocks of a layer's first `length` tokens. Asked for each layer in turn, the layers get the same one.

        With a `key` only those who ask with the same one do.
        """
        made = self._fork() if self._fork is not None else None
        if made is None or made.lengths[layer] is not None or self._forked_at != (length, key):
            made = Table(self.storage)
            made.share(self, length)
            self._fork, self._forked_at = weakref.ref(made), (length, key)
        made.lengths[layer] = length
        return made

    def reserve(self, blocks: int, copies: int = 0, more: int = 0) -> None:
        """Have `blocks` promised, `copies` of them for blocks that are shared already; `more` may be needed later. Raises PoolExhausted."""
        if blocks > 0 or more > 0:
            self.reservation = Reservation(self.storage.pool, max(0, blocks), copies, more)

    @property
    def room(self) -> int:
        """Tokens that can still come, in its blocks and in those promised to it."""
        reservation = self.reservation
        blocks = len(self.blocks) + (reservation.left - reservation.copies if reservation is not None else 0)
        held = max(length or 0 for length in self.lengths)
        if held % self.storage.block and self.storage.pool.count(self.blocks[-1]) > 1 and (reservation is None or reservation.copies == 0):
            blocks -= 1  # stored meanwhile, so that it is to be copied
        return blocks * self.storage.block - held

    def _room(self, start: int, stop: int) -> None:
        """Have blocks for the tokens from `start` to `stop` that no other table holds."""
        self._own(start // self.storage.block, self.storage.blocks_for(stop))
        missing = self.storage.blocks_for(stop) - len(self.blocks)
        if missing > 0:
            self._set(self.blocks + self._take(missing, self.blocks[-1] if self.blocks else None))
        self._fork = None

    def _own(self, first: int, stop: int) -> None:
        """Copy those of the blocks from `first` to `stop` that others hold as well."""
        pool = self.storage.pool
        for index in range(first, min(stop, len(self.blocks))):
            block = self.blocks[index]
            if pool.count(block) == 1:
                continue
            before = self.blocks[index - 1] if index else None
            try:
                own = self._for_copy(block, before)
            except PoolExhausted:
                if pool.count(block) == 1:  # whoever shared it was let go to make room
                    continue
                raise
            if pool.count(block) == 1:
                pool.let_go([own])
                continue
            self.storage.arenas.copy(block, own)
            self._set([*self.blocks[:index], own, *self.blocks[index + 1 :]])
            pool.let_go([block])

    def _for_copy(self, block: int, after: int | None) -> int:
        """A block for a copy of one that is shared.

        What was shared since the request was admitted, because its prefix was stored, nobody counted: a
        copy of it must not use up what the reply needs, unless there is nothing else.
        """
        reservation, pool = self.reservation, self.storage.pool
        if reservation is not None and reservation.copies == 0:
            try:
                return pool.take(1, after)[0]
            except PoolExhausted:
                if pool.count(block) == 1:
                    raise
        elif reservation is not None:
            reservation.copies -= 1
        return self._take(1, after)[0]

    def _take(self, count: int, after: int | None) -> list[int]:
        return self.reservation.take(count, after) if self.reservation is not None else self.storage.pool.take(count, after)

