"""A generation as bytes: taken on the generation thread between two tokens, written by another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_lm_hooks import Companion, GenerationState

from .. import caches as kinds
from ..cold.arrays import to_bytes
from ..cold.catalog import MAX_CHAIN, ColdEntry
from ..cold.checking import counts
from ..cold.jobs import Job, describe
from ..cold.meta import Meta
from ..identity import Identity
from ..index.keys import key_tokens, token_key

SCHEMA = "generation-checkpoint"
VERSION = 1
KIND = f"{SCHEMA}/{VERSION}"


@dataclass(eq=False)
class Attempt:
    """One run of a request. `namespace` is what all runs of the same request have in common.

    `durable` is the newest checkpoint on disk whose numbers are this run's, and
    `signatures` what its caches were: what goes on from it writes its new tokens only.
    `basis` is the checkpoint that a snapshot being taken goes on from.
    """

    identity: Identity
    namespace: str
    prompt: int
    durable: ColdEntry | None = None
    signatures: tuple[str, ...] = ()
    basis: ColdEntry | None = None
    ended: bool = False
    completed: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Fingerprint and namespace of its entries."""
        return self.identity.fingerprint, self.namespace


@dataclass(eq=False)
class Snapshot:
    """A checkpoint to be written. `parent` is the entry whose end its tensors go on from, None when they are whole."""

    attempt: Attempt
    key: bytes = field(repr=False)
    meta: Meta
    tensors: list[tuple[str, memoryview]] = field(repr=False)
    parent: ColdEntry | None

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.tensors)


def take(attempt: Attempt, state: GenerationState) -> Snapshot:
    """The bytes of a generation's state, copied from the caches. Generation thread only.

    Tokens keep their values while the row goes on, so only the slots behind those of
    `attempt.basis` are copied. Raises UnknownCacheClass, and ValueError for
    caches that do not hold the tokens.
    """
    scalars = {
        "prompt": attempt.prompt,
        "pending": state.pending,
        "context": state.context,
        "random": list(state.random) if state.random is not None else None,
    }
    key = token_key(state.tokens)
    job = Job(attempt.identity, attempt.namespace, key, state.caches, "assistant", companion=Companion(SCHEMA, VERSION, scalars))
    meta, arrays = describe(job)
    parent = attempt.basis
    if parent is not None and (len(parent.chain) >= MAX_CHAIN or attempt.signatures != meta.signatures or parent.length >= meta.length):
        parent = None
    start = parent.length if parent is not None else 0
    wanted = {
        spec.name: mx.contiguous(kinds.since(arrays[spec.name], spec.grow_axis, start if part else 0))
        for spec, part in zip(meta.tensors, meta.by_token, strict=True)
    }
    mx.eval(list(wanted.values()))  # once, not a wait for each
    return Snapshot(attempt, key, meta, [(name, to_bytes(array)) for name, array in wanted.items()], parent)


def state_of(caches: list[object], key: bytes, prompt: Sequence[int], companion: Companion | None) -> GenerationState | None:
    """The state that was stored; None when it is not one of this prompt. All of it is from a file."""
    if companion is None or (companion.schema, companion.version) != (SCHEMA, VERSION):
        return None
    tokens = key_tokens(key)
    found = companion.scalars
    if set(found) != {"prompt", "pending", "context", "random"} or found["prompt"] != len(prompt) or tokens[: len(prompt)] != list(prompt):
        return None
    sound = counts([found["pending"]], 1 << 31) and counts([found["context"]], len(prompt) + 1)
    random = found["random"]
    if random is not None and not (counts(random, 1 << 32) and len(random) == 2):
        return None
    if not sound or len(tokens) <= len(prompt) or any(not 0 <= token < 1 << 31 for token in tokens[len(prompt) :]):
        return None
    return GenerationState(tokens, found["pending"], caches, found["context"], tuple(random) if random is not None else None)


def signatures(caches: Sequence[object]) -> tuple[str, ...]:
    """What a snapshot's header will say its caches are."""
    return tuple(kinds.stored_signatures(caches))


def namespace_of(prompt: Sequence[int], policy: str) -> str:
    """Where the checkpoints of a request are: one place for each prompt and policy."""
    digest = hashlib.sha256(policy.encode())
    digest.update(token_key(prompt))
    return f"checkpoint:{digest.hexdigest()}"
