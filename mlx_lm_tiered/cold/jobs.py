"""What waits to be written: one job per entry, superseding each other, capped in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_lm_hooks import Companion

from .. import caches as kinds
from ..identity import Identity
from .arrays import spec_of
from .format import COMPANION
from .meta import CompanionMeta, Meta

MAX_ATTEMPTS = 5


@dataclass(eq=False)
class Job:
    """An entry to be written: `caches` hold the tokens of `key`. The queue owns them from `offer` on."""

    identity: Identity
    namespace: str
    key: bytes = field(repr=False)
    caches: list[Any] = field(repr=False)
    role: str = "assistant"
    kept: bool = False  # whether RAM keeps the entry as well: then the job is a snapshot, else it holds all there is
    urgent: bool = False  # not to wait until no request runs; written in small shares of the time then
    companion: Companion | None = field(default=None, repr=False)

    # The queue's own:
    nbytes: int = 0
    shortest: int = 0  # tokens that its caches can be cut to
    number: int = 0  # of its offer
    serial: int = 0  # of the first offer of its tokens, and of those that gave way to it: a flush after that waits for it
    due: float = 0.0
    attempts: int = 0
    tried_by_flush: int = 0
    announced: bool = False
    continue_until: int | None = None  # tokens of what is stored that it can continue, once it turned out not to be all

    @property
    def length(self) -> int:
        return len(self.key) // 8

    @property
    def place(self) -> tuple[str, str, bytes]:
        """Fingerprint, namespace and tokens: what the job will be found by."""
        return self.identity.fingerprint, self.namespace, self.key

    def measure(self) -> None:
        """Look at the caches: their bytes, and how far they can be cut. Generation thread only."""
        self.nbytes = kinds.nbytes(self.caches) + companion_nbytes(self.companion)
        self.shortest = shortest_cut(self.caches, self.length)

    def covers(self, other: Job) -> bool:
        """Whether this job's entry will serve the other's tokens, with the companion state they have."""
        if (self.identity.fingerprint, self.namespace) != (other.identity.fingerprint, other.namespace):
            return False
        if other.companion is not None:
            return self.key == other.key
        return self.key == other.key or (self.key.startswith(other.key) and other.length >= self.shortest)

    def serves(self, length: int) -> bool:
        """Whether its first `length` tokens can be reused."""
        return length == self.length or self.shortest <= length < self.length


def shortest_cut(caches: Sequence[Any], length: int) -> int:
    """The fewest leading tokens these caches of `length` tokens can be cut to; `length` when they cannot be cut.

    Caches that can be cut to n can be cut to anything between n and their length;
    caches that turn out otherwise are taken for uncuttable. Generation thread only.
    """
    low, high = max(1, kinds.minimum_reusable(caches)), length
    if low >= length or not kinds.can_cut(caches, length - 1):
        return length
    while low < high:
        middle = (low + high) // 2
        if kinds.can_cut(caches, middle):
            high = middle
        else:
            low = middle + 1
    probes = (low, low + (length - low) // 3, low + 2 * (length - low) // 3)
    return low if all(kinds.can_cut(caches, n) for n in probes) else length


def describe(job: Job) -> tuple[Meta, dict[str, mx.array | kinds.Later]]:
    """The header of a job's entry, and its tensors in file order. Generation thread only.

    Raises ValueError when the caches do not hold as many tokens as the key says.
    """
    held = kinds.length(job.caches)
    if held is not None and held != job.length:
        raise ValueError(f"the caches hold {held} tokens, the key {job.length}")
    dumped = kinds.dump(job.caches)
    specs = [spec_of(name, tensor.array, tensor.grow_axis) for name, tensor in dumped.tensors.items()]
    arrays = {name: tensor.array for name, tensor in dumped.tensors.items()}
    beside = None
    if job.companion is not None:
        own = {COMPANION + name: array for name, array in job.companion.tensors.items()}
        specs += [spec_of(name, array, None) for name, array in own.items()]
        arrays |= own
        beside = CompanionMeta(job.companion.schema, job.companion.version, job.companion.scalars, tuple(job.companion.tensors))
    shortest = shortest_cut(job.caches, job.length)
    meta = Meta(
        fingerprint=job.identity.fingerprint,
        namespace=job.namespace,
        length=job.length,
        tensors=tuple(specs),
        descriptors=dumped.descriptors,
        signatures=tuple(kinds.stored_signatures(job.caches)),
        cuttable=shortest < job.length,
        minimum_reusable=shortest,
        role=job.role,
        provenance=job.identity.provenance,
        companion=beside,
    )
    return meta, arrays


def companion_nbytes(companion: Companion | None) -> int:
    """Bytes of its tensors."""
    return sum(array.nbytes for array in companion.tensors.values()) if companion is not None else 0
