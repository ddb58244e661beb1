"""A model's attention and caches as they are with paging, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.paged import plan
from mlx_lm_tiered.paged import scheme as _registers_kinds  # noqa: F401
from mlx_lm_tiered.paged.attention import build
from mlx_lm_tiered.schemes.attention import caches_use
from mlx_lm_tiered.schemes.scheme import Scheme
from mlx_lm_tiered.schemes.spec import Spec
from mlx_lm_tiered.statistics import Statistics


class Paging:
    """What paging makes of a model under a KV scheme, if there is one. Raises ValueError where it cannot serve the model, or the model cannot have the scheme."""

    def __init__(self, model: Any, scheme: Scheme | None, kernels: Kernels):
        self.model, self.kernels, self._scheme = model, kernels, scheme
        self.caches()  # which has the scheme make its plan
        schemes = None if scheme is None else scheme.plan_of(model)
        if scheme is not None and schemes is None:
            raise ValueError(f"the model cannot have {scheme.spec}")
        found = plan.make(model, make_prompt_cache(model), schemes)
        if found is None:
            raise ValueError("none of the model's caches is of full attention")
        self.plan = found

    @property
    def token_bytes_ratio(self) -> float:
        """Bytes of a token in blocks over those of its keys and values as they are computed."""
        return self.plan.token_bytes / sum(sides.computed_bytes for sides in self.plan.paged)

    def caches(self) -> list[Any]:
        """Fresh ones without paging."""
        caches = make_prompt_cache(self.model)
        return caches if self._scheme is None else self._scheme.caches(self.model, None, caches)


@contextmanager
def paging(model: Any, spec: Spec, fault: Callable[[str], None]) -> Iterator[Paging]:
    """With attention as it is then. Raises ValueError."""
    if spec.start:
        raise ValueError(f"{spec} begins at token {spec.start}, and blocks have one form")
    upstream = base.quantized_scaled_dot_product_attention
    scheme = None if spec.plain else Scheme(spec, Statistics())
    kernels = Kernels("auto", fault) if scheme is None else scheme.kernels
    base.quantized_scaled_dot_product_attention = build(upstream if scheme is None else scheme.attention(upstream))
    try:
        yield Paging(model, scheme, kernels)
    finally:
        base.quantized_scaled_dot_product_attention = upstream
        caches_use(Kernels("off"))
