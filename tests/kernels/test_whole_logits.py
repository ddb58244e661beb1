"""Whole models over mlx-lm's own quantized caches and over a scheme's: bit for bit where mlx-lm's way is taken, within 1e-5 by tiles and by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import plain
import pytest
from families import CONFIGS, build_config

from mlx_lm_hooks import disable, enable
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.kernels.layout import Layout
from mlx_lm_tiered.schemes import attention, softmax
from mlx_lm_tiered.schemes.caches import QuantizedKVCache
from support.models import TINY

TOKENS = mx.random.randint(3, 1000, (1, 96), key=mx.random.key(4))
PREFILL, STEPS = 84, 12
CLOSE = 1e-5
FORMATS = [(4, 32), (8, 32)]


def llama() -> Any:
    from mlx_lm import load

    return load(str(TINY["llama"]))[0]


# The families of which all caches are plain.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "dense": lambda: build_config(CONFIGS["dense"] | {"head_dim": 32}, 5),
    "moe": lambda: build_config(CONFIGS["moe"] | {"head_dim": 32}, 5),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> plain.Library:
    shapes = [plain.affine(bits, group, 32, each=each, kv_heads=2, scale=32**-0.5) for bits, group in FORMATS for each in (1, 2)]
    return plain.Library(shapes, tmp_path_factory.mktemp("plain"))


def by_the_kernel(library: plain.Library, calls: list[int]) -> Callable[..., mx.array]:
    def attend(self: Any, queries: mx.array, keys: Any, values: Any, slots: int, scale: float, mask: Any, sinks: Any, layout: Layout, otherwise: Any) -> mx.array:
        assert mask is None and sinks is None and queries.shape[2] == 1
        calls.append(layout.key_bits)
        kv_heads = keys[0].shape[1]
        shape = plain.Shape(layout, queries.shape[3], each=queries.shape[1] // kv_heads, kv_heads=kv_heads, scale=scale)
        held = [tuple(mx.contiguous(part) for part in side) for side in (keys, values)]
        return mx.array(library.decode(shape, mx.contiguous(queries), *held, slots, None, 3))

    return attend


def upstreams(model: Any, bits: int, group: int) -> tuple[list[mx.array], list[Any]]:
    """Logits of a prefill in parts of 7 tokens and of single tokens, by mlx-lm; and its caches."""
    from mlx_lm.models import cache

    caches = [cache.QuantizedKVCache(group_size=group, bits=bits) for _ in model.layers]
    parts = [TOKENS[:, i : i + 7] for i in range(0, PREFILL, 7)] + [TOKENS[:, i : i + 1] for i in range(PREFILL, PREFILL + STEPS)]
    logits = [model(part, cache=caches) for part in parts]
    mx.eval(logits)
    return logits, caches


def held(caches: list[Any], n: int, bits: int, group: int) -> list[Any]:
    """A scheme's caches with the very numbers of mlx-lm's, of the first `n` tokens."""
    made = []
    for cache in caches:
        ours = QuantizedKVCache(bits=bits, group_size=group)
        for part, keys, values in zip(ours.parts, cache.keys, cache.values, strict=True):
            part.update_and_fetch(keys[:, :, :n], values[:, :, :n])
        made.append(ours)
    return made


def same(ours: list[Any], theirs: list[Any], n: int) -> bool:
    """Whether token `n` was quantized to the same numbers. Elsewhere rounding has moved one by a step, and the caches differ."""
    return all(
        mx.array_equal(a[0][:, :, n], b[0][:, :, n]) for o, t in zip(ours, theirs, strict=True) for a, b in ((o.keys, t.keys), (o.values, t.values))
    )


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_upstreams(monkeypatch, library, name, bits, group):
    enable("tiered", kv_scheme=f"affine:{bits}:{group}", prompt_cache_bytes=0)
    try:
        model = MODELS[name]()
        from mlx_lm.models.cache import make_prompt_cache

        mine = make_prompt_cache(model)
        assert {type(cache) for cache in mine} == {QuantizedKVCache}
        disable()
        expected, theirs = upstreams(model, bits, group)
        enable("tiered", kv_scheme=f"affine:{bits}:{group}", prompt_cache_bytes=0)
        parts = [TOKENS[:, i : i + 7] for i in range(0, PREFILL, 7)] + [TOKENS[:, i : i + 1] for i in range(PREFILL, PREFILL + STEPS)]
        assert all(mx.array_equal(model(part, cache=mine), logits) for part, logits in zip(parts, expected, strict=True))

        steps = expected[-STEPS:]
        monkeypatch.setattr(attention, "FEW", 0)
        monkeypatch.setattr(softmax, "LARGEST_TILE", 32)
        monkeypatch.setattr(softmax, "SMALLEST_TILE", 32)
        assert _close(model, steps, theirs, bits, group) >= STEPS * 2 // 3, "by tiles"
        calls: list[int] = []
        monkeypatch.setattr(Kernels, "attend", by_the_kernel(library, calls))
        assert _close(model, steps, theirs, bits, group) >= STEPS * 2 // 3, "by the kernel"
        assert len(calls) == STEPS * len(theirs)
    finally:
        disable()


def _close(model: Any, steps: list[mx.array], theirs: list[Any], bits: int, group: int) -> int:
    """How many steps could be compared; all of those are close."""
    compared = 0
    for number, expected in enumerate(steps):
        n = PREFILL + number
        caches = held(theirs, n, bits, group)
        logits = model(TOKENS[:, n : n + 1], cache=caches)
        if same(caches, theirs, n):
            compared += 1
            difference = mx.abs(logits - expected).max().item()
            assert difference < CLOSE * max(1.0, mx.abs(expected).max().item())
    return compared
