"""Which of a model's caches a scheme quantizes, found by running the model on two tokens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .convert import fresh, leaves, target, unfit
from .cost import Layer, Type, window_of
from .spec import Affine, Form


@dataclass(frozen=True)
class Plan:
    """A scheme for the caches that a model makes, in their order; None for those that stay as they are. `layers` has what each costs."""

    forms: tuple[Form | None, ...]
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

    @property
    def left(self) -> int:
        """How many caches with keys and values stay in full precision although the scheme is for all."""
        asked = (layers for form, layers in zip(self.forms, self.layers, strict=True) if form is not None)
        return sum(layer.quantized is None and layer.per_token > 0 for layers in asked for layer in layers)


def make(model: Any, caches: Sequence[Any], asked: dict[int, Affine] | Form | None, start: int) -> Plan:
    """The plan for a model, whose fresh `caches` stay unused. Raises ValueError with one sentence that names the layer."""
    if isinstance(asked, dict):
        if beyond := sorted(index for index in asked if not 0 <= index < len(caches)):
            raise ValueError(f"layer {beyond[0]} is out of range: the model makes caches 0 to {len(caches) - 1}")
        forms: tuple[Form | None, ...] = tuple(asked.get(index) for index in range(len(caches)))
    else:
        forms = tuple(asked for _ in caches)
    probe = copy.deepcopy(list(caches))
    _run(model, probe, 2)
    for index, (cache, wanted) in enumerate(zip(probe, forms, strict=True)):
        if wanted is not None:
            _check(index, cache, wanted, listed=isinstance(asked, dict))
    layers = tuple(tuple(measured(leaf, form, start) for leaf in leaves([cache])) for cache, form in zip(probe, forms, strict=True))
    plan = Plan(forms, layers, start)
    if plan.left and not any(layer.quantized for each in layers for layer in each):
        raise ValueError("none of its layers has full attention")
    trial = apply(plan, copy.deepcopy(list(caches)))
    try:
        _run(model, trial, 2)
        _run(model, trial, 1)
    except Exception as error:
        raise ValueError(f"the model's attention cannot read quantized KV ({type(error).__name__}: {error})") from error
    return plan


def apply(plan: Plan, caches: list[Any]) -> list[Any]:
    """Fresh caches in the classes that the plan says, whatever its start."""
    return [cache if form is None else fresh(cache, form) for cache, form in zip(caches, plan.forms, strict=True)]


def _run(model: Any, caches: list[Any], tokens: int) -> None:
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])


def _check(index: int, cache: Any, wanted: Form, *, listed: bool) -> None:
    able = [leaf for leaf in leaves([cache]) if target(leaf, wanted) is not None and leaf.keys is not None]
    if listed and not able:
        raise ValueError(f"layer {index} keeps a {type(cache).__name__}, of which there is no quantized form")
    for leaf in able:
        if reason := unfit(leaf, wanted):
            raise ValueError(f"layer {index}: {reason}")


def measured(cache: Any, form: Form | None = None, start: int = 0) -> Layer:
    """What a cache that holds tokens costs, under a form that it may have from a start on."""
    if isinstance(cache, ArraysCache):
        return Layer(constant=cache.nbytes)
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        return Layer()
    (key_width, value_width), size = [side.shape[1] * side.shape[3] for side in (keys, values)], keys.dtype.size
    quantized = form.nbytes(key_width, value_width, size) if form is not None and target(cache, form) is not None else None
    return Layer((key_width + value_width) * size, window_of(cache), quantized=quantized, start=start if quantized is not None else 0)
