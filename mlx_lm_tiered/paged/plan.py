"""Which of a model's caches are paged, found by running the model on a few tokens, and whether its attention can read several rows' blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..schemes import plan as schemes
from ..schemes.convert import leaves
from ..schemes.cost import Layer
from ..schemes.plan import measured
from .arenas import Arenas
from .moving import into_blocks
from .pool import Pool
from .sides import Sides, sides_of
from .table import Storage, Table

# What logits may differ by, of their largest, before they are taken for wrong. What is wrong is wrong by far more; the
# numbers themselves are compared bit for bit by the tests.
TOLERANCE = 0.05
# Of rows under a KV scheme, which were compared without it before.
UNDER_A_SCHEME = 0.5
# Tokens of the forwards that are compared.
SEEN = (2, 1, 2)


@dataclass(frozen=True)
class Plan:
    """`sides` has, for each leaf of a model's caches, what its tokens look like where it is paged. `layers` has what each costs beside the pool."""

    sides: tuple[Sides | None, ...]
    layers: tuple[tuple[Layer, ...], ...]
    padded: bool

    @property
    def paged(self) -> tuple[Sides, ...]:
        return tuple(sides for sides in self.sides if sides is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all paged layers."""
        return sum(sides.token_bytes for sides in self.paged)

    def storage(self, blocks: int, block: int) -> Storage:
        """A pool with its arenas."""
        storage = Storage(Pool(blocks), Arenas(self.paged, blocks, block), self.sides)
        storage.padded = self.padded
        return storage

    def apply(self, caches: Sequence[Any], storage: Storage) -> list[Any]:
        """A model's fresh caches, those of full attention over a new table."""
        return into_blocks(caches, Table(storage))


def make(model: Any, caches: Sequence[Any], scheme: schemes.Plan | None = None) -> Plan | None:
    """The plan for a model, whose fresh `caches` stay unused; None where no cache is of full attention. Raises ValueError with one sentence.

    `scheme` is a KV scheme's plan for it. Whether the model's attention takes rows is found out in its own precision, too: what rounds differently
    beside another row may be quantized to the next step, in every layer.
    """
    plain = copy.deepcopy(list(caches))
    expected = [_run(model, plain, chunk) for chunk in _chunks(SEEN)]
    plan = _planned(plain, [[measured(leaf) for leaf in leaves([cache])] for cache in plain])
    if plan is None:
        return None
    _alone(model, plan, caches, expected)
    if all(hasattr(cache, "merge") for cache in caches):
        plan = _of_rows(model, plan, caches, [expected[0][:, -1:], *expected[1:]])
    return plan if scheme is None else _under(scheme, model, plan, caches)


def _under(scheme: schemes.Plan, model: Any, plain: Plan, caches: Sequence[Any]) -> Plan | None:
    """The same under a scheme, of a model whose plan without it is `plain`."""
    fresh = schemes.apply(scheme, copy.deepcopy(list(caches)))
    held = copy.deepcopy(fresh)
    expected = [_run(model, held, chunk) for chunk in _chunks(SEEN)]
    plan = _planned(held, scheme.layers, plain.padded)
    if plan is None:
        return None
    _alone(model, plan, fresh, expected)
    try:
        if all(hasattr(cache, "merge") for cache in fresh):
            _compare(_rows(model, plan, fresh), [expected[0][:, -1:], *expected[1:]], UNDER_A_SCHEME)
    except Exception as error:
        raise ValueError(f"the model's attention cannot read rows of paged KV under a scheme ({type(error).__name__}: {error})") from error
    return plan


def _planned(held: Sequence[Any], costs: Sequence[Sequence[Layer]], padded: bool = False) -> Plan | None:
    """Of caches that hold tokens, and what each one's layers cost; None where none is of full attention."""
    sides = tuple(map(sides_of, leaves(held)))
    if not any(sides):
        return None
    found = iter(sides)
    layers = tuple(tuple(layer if (side := next(found)) is None else Layer(computed=side.computed_bytes) for layer in each) for each in costs)
    return Plan(sides, layers, padded)


def _alone(model: Any, plan: Plan, caches: Sequence[Any], expected: Sequence[mx.array]) -> None:
    """Compare one row's logits."""
    try:
        paged = plan.apply(copy.deepcopy(list(caches)), plan.storage(4, 2))
        _compare([_run(model, paged, chunk) for chunk in _chunks(SEEN)], expected)
    except Exception as error:
        raise ValueError(f"the model's attention cannot read paged KV ({type(error).__name__}: {error})") from error


def _of_rows(model: Any, plan: Plan, caches: Sequence[Any], expected: Sequence[mx.array]) -> Plan:
    """The plan with which the model's attention reads rows."""
    reasons = []
    for padded in (False, True):
        plan = Plan(plan.sides, plan.layers, padded)
        try:
            _compare(_rows(model, plan, caches), expected)
            return plan
        except Exception as error:
            reasons.append(error)
    raise ValueError(f"the model's attention cannot read rows of paged KV ({type(reasons[-1]).__name__}: {reasons[-1]})") from reasons[-1]


def _chunks(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Tokens from `first` on, in chunks. No two are the same: what attends to the wrong ones of equal tokens gives the right numbers."""
    starts = [first + sum(lengths[:at]) for at in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


def _run(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _rows(model: Any, plan: Plan, caches: Sequence[Any]) -> list[mx.array]:
    """A row's logits of its second token, its third, and two more at once, beside a row that is a token longer and gets one then."""
    storage = plan.storage(8, 2)
    rows = [plan.apply(copy.deepcopy(list(caches)), storage) for _ in range(2)]
    chunks, others = _chunks((1, 1, 1, 2)), _chunks((2, 1, 1, 1), first=1)
    for row, tokens in zip(rows, (chunks, others), strict=True):
        _run(model, row, tokens[0])
    batch = [cache.merge([cache, other]) for cache, other in zip(*rows, strict=True)]
    seen = []
    for step in (1, 2):
        logits = model(mx.array([chunks[step], others[step]]), cache=batch)
        mx.eval(logits, [cache.state for cache in batch])
        seen.append(logits[:1])
    for cache in batch:
        cache.prepare(lengths=[2, 1], right_padding=[0, 1])
    logits = model(mx.array([chunks[3], [*others[3], 0]]), cache=batch)
    for cache in batch:
        cache.finalize()
    mx.eval(logits, [cache.state for cache in batch])
    return [*seen, logits[:1]]


def _compare(found: Sequence[mx.array], expected: Sequence[mx.array], tolerance: float = TOLERANCE) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        theirs = theirs.astype(mx.float32)
        apart: Any = mx.abs(mine.astype(mx.float32) - theirs).max().item()
        largest: Any = mx.abs(theirs).max().item()
        if not apart <= tolerance * max(1e-6, largest):
            raise ValueError(f"logits differ by {apart:.3g}")
