"""Which of a model's caches a scheme quantizes, found by running the model on two tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .convert import SINGLE, fits, fresh, leaves
from .spec import Affine


@dataclass(frozen=True)
class Layer:
    """What one cache costs: keys and values together have `width` elements of `itemsize` bytes a token, or `fixed` bytes whatever the length.

    `window` bounds the tokens that are kept; None for all of them.
    """

    width: int = 0
    itemsize: int = 0
    window: int | None = None
    fixed: int = 0


@dataclass(frozen=True)
class Plan:
    """A scheme for the caches that a model makes, in their order; None for those that stay as they are."""

    affine: tuple[Affine | None, ...]
    layers: tuple[tuple[Layer, ...], ...]
    start: int = 0

    def bytes_at(self, tokens: int) -> int:
        """KV of a sequence of that many tokens, without room for growth."""
        return sum(
            _bytes(layer, affine if tokens >= max(1, self.start) else None, tokens)
            for affine, layers in zip(self.affine, self.layers, strict=True)
            for layer in layers
        )


def _bytes(layer: Layer, affine: Affine | None, tokens: int) -> int:
    held = tokens if layer.window is None else min(tokens, layer.window)
    if affine is None or not layer.width:
        return layer.fixed + held * layer.width * layer.itemsize
    # A scale and a bias a group, in the model's own type.
    return held * layer.width // affine.group_size * (affine.group_size * affine.bits // 8 + 2 * layer.itemsize)


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
    plan = Plan(affine, tuple(tuple(_measure(leaf) for leaf in leaves([cache])) for cache in probe), start)
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


def _measure(cache: Any) -> Layer:
    if isinstance(cache, ArraysCache):
        return Layer(fixed=cache.nbytes)
    keys = getattr(cache, "keys", None)
    if keys is None:
        return Layer()
    width = keys.shape[1] * keys.shape[3] + cache.values.shape[1] * cache.values.shape[3]
    return Layer(width, keys.dtype.size, getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None))
