"""Which of a model's caches a scheme quantizes, found by running the model on two tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .convert import SINGLE, fits, fresh, leaves
from .cost import Layer, Type, window_of
from .spec import Affine


@dataclass(frozen=True)
class Plan:
    """A scheme for the caches that a model makes, in their order; None for those that stay as they are. `layers` has what each costs."""

    affine: tuple[Affine | None, ...]
    layers: tuple[tuple[Layer, ...], ...]
    start: int = 0

    def bytes_at(self, tokens: int) -> int:
        """KV of a sequence of that many tokens, without room for growth."""
        return sum(self.bytes_by_type(tokens).values())

    def bytes_by_type(self, tokens: int) -> Counter[Type]:
        """The same, by the types of layers."""
        found: Counter[Type] = Counter()
        for layers in self.layers:
            for layer in layers:
                found[layer.type] += int(layer.bytes_at(tokens))
        return found


def make(model: Any, caches: Sequence[Any], asked: dict[int, Affine] | Affine | None, start: int) -> Plan:
    """The plan for a model, whose fresh `caches` stay unused. Raises ValueError with one sentence that names the layer."""
    if isinstance(asked, dict):
        if beyond := sorted(index for index in asked if not 0 <= index < len(caches)):
            raise ValueError(f"layer {beyond[0]} is out of range: the model makes caches 0 to {len(caches) - 1}")
        affine = tuple(asked.get(index) for index in range(len(caches)))
    else:
        affine = tuple(asked for _ in caches)
    probe = copy.deepcopy(list(caches))
    _run(model, probe, 2)
    for index, (cache, wanted) in enumerate(zip(probe, affine, strict=True)):
        if wanted is not None:
            _check(index, cache, wanted, listed=isinstance(asked, dict))
    plan = Plan(affine, tuple(tuple(_measure(leaf, to, start) for leaf in leaves([cache])) for cache, to in zip(probe, affine, strict=True)), start)
    trial = apply(plan, copy.deepcopy(list(caches)))
    try:
        _run(model, trial, 2)
        _run(model, trial, 1)
    except Exception as error:
        raise ValueError(f"the model's attention cannot read quantized KV ({type(error).__name__}: {error})") from error
    return plan


def apply(plan: Plan, caches: list[Any]) -> list[Any]:
    """Fresh caches in the classes that the plan says, whatever its start."""
    return [cache if affine is None else fresh(cache, affine) for cache, affine in zip(caches, plan.affine, strict=True)]


def _run(model: Any, caches: list[Any], tokens: int) -> None:
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])


def _check(index: int, cache: Any, wanted: Affine, *, listed: bool) -> None:
    able = [leaf for leaf in leaves([cache]) if type(leaf) in SINGLE and leaf.keys is not None]
    if listed and not able:
        raise ValueError(f"layer {index} keeps a {type(cache).__name__}, of which there is no quantized form")
    for leaf in able:
        if not fits(leaf, wanted):
            dims = sorted({leaf.keys.shape[3], leaf.values.shape[3]})
            raise ValueError(f"layer {index}: heads of {' and '.join(map(str, dims))} cannot be cut into groups of {wanted.group_size}")


def _measure(cache: Any, affine: Affine | None, start: int) -> Layer:
    if isinstance(cache, ArraysCache):
        return Layer(constant=cache.nbytes)
    keys = getattr(cache, "keys", None)
    if keys is None:
        return Layer()
    width = keys.shape[1] * keys.shape[3] + cache.values.shape[1] * cache.values.shape[3]
    size, quantized = keys.dtype.size, None
    if affine is not None and type(cache) in SINGLE:
        # A scale and a bias a group, in the model's own type.
        quantized = width * (affine.bits / 8 + 2 * size / affine.group_size)
    return Layer(width * size, window_of(cache), quantized=quantized, start=start if quantized is not None else 0)
