"""A scheme at work: implements the contract's `KVScheme`."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..kernels.choice import Kernels
from ..statistics import Statistics
from . import attention, mixed, plan
from .convert import convert, convert_rows, leaves, target
from .layers import for_model
from .lockstep import Lockstep
from .plan import Plan
from .spec import Affine, Form, Spec

logger = logging.getLogger("mlx_lm_tiered")

_ATTRIBUTE = "_mlx_lm_tiered_kv_plan"


class Scheme:
    """One for a start. A model that cannot be given the scheme keeps full precision, with one warning."""

    def __init__(self, spec: Spec, statistics: Statistics, kernels: str = "auto"):
        self.spec = spec
        self.start = spec.start
        self._statistics = statistics
        self.kernels = Kernels(kernels, lambda text: statistics.fault("decode_kernel", text))
        attention.caches_use(self.kernels)
        self.conversions = 0
        self._read: dict[Path | None, dict[int, Affine] | Form | ValueError | None] = {}
        self.plans: dict[Path | None, Plan | None] = {}  # the latest of each model, by directory; None where the scheme is off

    def name(self, path: Path | None) -> str:
        """What tells entries of this scheme from others': the schemes of all layers, where they differ by layer."""
        if self.plans.get(path, True) is None:
            return "plain"
        if not self.spec.config:
            return "plain" if self.spec.form is None else f"{self.spec.form.key}@{self.start}"
        layers = self._asked(path)
        if isinstance(layers, ValueError):
            return "plain"
        text = ",".join(f"{index}={affine}" for index, affine in sorted(layers.items())) if isinstance(layers, dict) else ""
        return f"config:{hashlib.sha256(text.encode()).hexdigest()[:16]}" if text else "plain"

    def model_loaded(self, model: Any) -> None:
        """Its plan is made when it is asked for caches."""

    def caches(self, model: Any, path: Path | None, caches: list[Any]) -> list[Any]:
        """A model's fresh caches as the scheme has them; under a start above 0 they begin as they are."""
        found = self._plan(model, path, caches)
        if found is None or self.start > 0 or len(found.forms) != len(caches):
            return caches
        return plan.apply(found, caches)

    def converts(self, model: Any) -> bool:
        """Whether the model can have the scheme, and its caches are quantized at the start."""
        return self.start > 0 and self.plan_of(model) is not None

    def plain_class(self, cache: Any) -> type:
        """The class that a cache had before it was quantized."""
        return cache.inner if isinstance(cache, Lockstep) else type(cache)

    def due(self, caches: Sequence[Any]) -> bool:
        """Whether some cache of a request is plain and holds `start` tokens or more."""
        form = self.spec.form
        return form is not None and self.start > 0 and any(target(c, form) and c.offset >= self.start for c in leaves(caches))

    def convert(self, caches: list[Any]) -> None:
        """Quantize one request's caches that are due, in place."""
        if self.spec.form is not None and self.due(caches) and convert(caches, self.spec.form, self.start):
            self.conversions += 1

    def convert_rows(self, caches: list[Any], rows: Sequence[int]) -> None:
        """Quantize rows of a batch that hold exactly `start` tokens, in the list."""
        if self.spec.form is not None:
            convert_rows(caches, rows, self.spec.form)
            self.conversions += len(rows)

    def merge(self, rows: Sequence[list[Any]]) -> list[Any] | None:
        """A batch of requests of which some are quantized and some not yet; None where all are alike."""
        shapes = {tuple(type(cache) for cache in leaves(row)) for row in rows}
        if len(shapes) == 1:
            return None
        batch = [type(cache).merge([cache]) for cache in rows[0]]
        for row in rows[1:]:
            batch = self.extend(batch, [type(cache).merge([cache]) for cache in row])
        return batch

    def extend(self, batch: list[Any], other: list[Any]) -> list[Any]:
        """A batch with the rows of another behind its own; both are given up."""
        return [_extended(cache, more) for cache, more in zip(batch, other, strict=True)]

    def short(self, caches: list[Any]) -> None:
        """Room is the memory guard's to watch."""

    def attention(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for mlx-lm's quantized attention."""
        return attention.build(upstream, self.kernels)

    def plan_of(self, model: Any) -> Plan | None:
        """The plan that was made for a model; None before its first caches, and where the scheme is off."""
        known = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        return known[1] if known is not None and known[0] is self else None

    def report(self, entries: Sequence[Any]) -> dict[str, Any]:
        """What `/stats` shows: of stored `entries` with a plan, the bytes they should take and those they do, room for growth included."""
        predicted, actual = Counter[str](), Counter[str]()
        for entry in entries:
            models = [entry.source] if entry.source.draft is None else [entry.source, entry.source.draft]
            plans = [self.plans.get(model.path) for model in models]
            layers = [layers for found in plans if found is not None for layers in found.layers]
            if len(layers) != len(entry.caches):
                continue  # of a model that keeps full precision
            for layer, cache in zip(chain.from_iterable(layers), leaves(entry.caches), strict=True):
                predicted[layer.type] += int(layer.bytes_at(entry.length))
                actual[layer.type] += cache.nbytes
        return {
            "scheme": str(self.spec),
            "conversions": self.conversions,
            "kernels": self.kernels.state,
            "kernels_failed": self.kernels.failed,
            "kernels_slower": self.kernels.slower,
            "predicted_bytes": predicted.total(),
            "actual_bytes": actual.total(),
            "layers": {kind: {"predicted_bytes": predicted[kind], "actual_bytes": actual[kind]} for kind in predicted},
            "bytes_per_1000_tokens": {path.name: found.bytes_at(1000) for path, found in self.plans.items() if path and found is not None},
        }

    def _asked(self, path: Path | None) -> dict[int, Affine] | Form | ValueError | None:
        """What is asked for a model, read once: were its file changed meanwhile, entries would be named after what they are not."""
        if path not in self._read:
            try:
                self._read[path] = for_model(self.spec, path)
            except ValueError as error:
                self._read[path] = error
        return self._read[path]

    def _plan(self, model: Any, path: Path | None, caches: list[Any]) -> Plan | None:
        known = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
        if known is not None and known[0] is self:
            return known[1]
        found = None
        asked = self._asked(path)
        try:
            if isinstance(asked, ValueError):
                raise asked
            found = plan.make(model, caches, asked, self.start) if asked else None
        except ValueError as error:
            self._statistics.fault("kv_scheme", f"{self.spec.origin} {self.spec} is off for {path or 'this model'}: {error}")
        if found is not None and found.left:
            logger.warning("%s %s: %d caches of %s are not of full attention and stay as they are", self.spec.origin, self.spec, found.left, path or "this model")
        if hasattr(model, "__dict__"):
            # Not through nn.Module's own __setattr__, which would make it a member of the model.
            object.__setattr__(model, _ATTRIBUTE, (self, found))
        self.plans[path] = found
        return found


def _extended(cache: Any, other: Any) -> Any:
    if hasattr(cache, "caches"):
        cache.caches = tuple(_extended(a, b) for a, b in zip(cache.caches, other.caches, strict=True))
        return cache
    if hasattr(cache, "left_padding") and hasattr(cache, "update_and_fetch"):
        return mixed.extend(cache, other)
    cache.extend(other)
    return cache
