"""Decode attention on a GPU: microseconds of one step's, by format and context, and the steps of a whole model.

Timing: CALLS attentions are chained, each output the next one's queries, and evaluated
at once, as the layers of a decode step are; the time is the whole evaluation's, from
Python's building of the graph to the last result, over CALLS. The calls go round over
caches that together exceed the GPU's own cache, as the layers of a model do. What is
measured is the median of REPEATS such chains, after two that are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_lm_tiered.kernels.check import TOLERANCE, Format, error
from mlx_lm_tiered.kernels.decode import BITS, GROUPS, decode
from mlx_lm_tiered.kernels.tuning import Tuning
from mlx_lm_tiered.schemes.convert import fresh
from mlx_lm_tiered.schemes.spec import Affine, Form

from . import report

HEADS, KV_HEADS, DIM = 32, 8, 128
CALLS, REPEATS = 32, 9
BEYOND_CACHE = 256 << 20
# Warps a block and resident blocks, each compiled; and splits.
SHAPES = ((1, 0), (2, 0), (4, 0), (4, 3), (4, 4), (8, 0))
SPLITS = (16, 24, 33, 49, 66, 99, 132)


def forms() -> list[Format]:
    """Every format at head dimension 128, others at fewer."""
    found = [Format(bits, group, 128, 4, mx.bfloat16, mx.bfloat16) for bits in BITS for group in GROUPS]
    found += [Format(8, 64, 64, 1, mx.float32, mx.float32), Format(4, 32, 96, 12, mx.float16, mx.float16), Format(4, 64, 256, 8, mx.float32, mx.bfloat16)]
    return found + [Format(bits, 64, 128, 4, mx.bfloat16, mx.bfloat16, masked=True) for bits in (4, 8)]


def self_test() -> list[dict[str, Any]]:
    """Every one of `forms`, and every shape of a block; the error's text where one does not compile or run."""
    cases: list[tuple[Format, Tuning | None]] = [(form, None) for form in forms()]
    cases += [(Format(bits, 64, 128, 4, mx.bfloat16, mx.bfloat16), Tuning(warps, 7, resident)) for bits in (8, 4) for warps, resident in SHAPES]
    rows = []
    for form, tuning in cases:
        started = time.perf_counter()
        try:
            found, text = error(form, tuning), ""
        except (RuntimeError, ValueError) as raised:
            found, text = float("nan"), str(raised)
        name = f"affine:{form.bits}:{form.group_size} d {form.dim} x {form.each} {form.queries}{' masked' if form.masked else ''}{f' {tuning}' if tuning else ''}"
        rows.append({"format": name, "ok": found <= TOLERANCE[form.queries], "error": found, "seconds": time.perf_counter() - started, "raised": text})
    return rows


def run(contexts: Sequence[int] = (4096, 16384, 65536), schemes: Sequence[tuple[int, int]] = ((8, 64), (4, 64))) -> list[dict[str, Any]]:
    """One row a context and format, `us` microseconds a step; `tb_s` the terabytes a second of KV that it reads."""
    rows = []
    for tokens in contexts:
        plain = _caches(tokens, None)
        rows.append(_row(tokens, "bf16 sdpa", plain, lambda q, pair: mx.fast.scaled_dot_product_attention(q, *pair, scale=DIM**-0.5)))
        for bits, group in schemes:
            pairs = _caches(tokens, (bits, group))
            rows.append(_row(tokens, f"affine:{bits}:{group}", pairs, _kernel(bits, group, None)))
            full = [tuple(tuple(mx.contiguous(part) for part in side) for side in pair) for pair in pairs[:1]]
            mx.eval(full)
            theirs = lambda q, pair, bits=bits, group=group: base.quantized_scaled_dot_product_attention(
                q + 0, *pair, scale=DIM**-0.5, mask=None, group_size=group, bits=bits
            )
            rows.append(_row(tokens, f"mlx-lm affine:{bits}:{group}, full cache", full, theirs))
    return rows


def sweep(contexts: Sequence[int] = (4096, 16384, 65536), schemes: Sequence[tuple[int, int]] = ((8, 64), (4, 64))) -> list[dict[str, Any]]:
    """The best number of splits for each context, format, and shape of a block, best first."""
    rows = []
    for tokens in contexts:
        for bits, group in schemes:
            pairs = _caches(tokens, (bits, group))
            found, failed = [], set()
            for warps, resident in SHAPES:
                for splits in SPLITS:
                    if splits * warps * 16 <= tokens:
                        try:
                            us = measure(_kernel(bits, group, Tuning(warps, splits, resident)), pairs, repeats=3)[0]
                        except (RuntimeError, ValueError) as raised:
                            failed.add(f"warps {warps}, resident {resident}: {raised}")
                            break
                        found.append((us, warps, splits, resident))
            best: dict[tuple[int, int], tuple[float, int, int, int]] = {}
            for one in sorted(found):
                best.setdefault((one[1], one[3]), one)
            name = f"affine:{bits}:{group}"
            rows += [{"tokens": tokens, "format": name, "us": us, "warps": w, "splits": s, "resident": r} for us, w, s, r in best.values()]
            for text in sorted(failed):
                print(f"{name}: {text[:600]}")
    return rows


def measure(attend: Callable[[mx.array, Any], mx.array], pairs: Sequence[Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Microseconds of one attention, as the module says; and those of them that Python took to build the graph."""
    q = mx.random.normal((1, HEADS, 1, DIM)).astype(mx.bfloat16)
    mx.eval(q)
    times, built = [], []
    for _ in range(2 + repeats):
        started = time.perf_counter()
        y = q
        for call in range(CALLS):
            y = attend(y, pairs[call % len(pairs)])
        built.append(time.perf_counter() - started)
        mx.eval(y)
        times.append(time.perf_counter() - started)
    return median(times[2:]) / CALLS * 1e6, median(built[2:]) / CALLS * 1e6


def _kernel(bits: int, group: int, tuning: Tuning | None) -> Callable[[mx.array, Any], mx.array]:
    return lambda q, pair: decode(q, *pair, DIM**-0.5, None, bits, group, tuning)


def _row(tokens: int, name: str, pairs: Sequence[Any], attend: Callable[[mx.array, Any], mx.array]) -> dict[str, Any]:
    try:
        us, built = measure(attend, pairs)
    except (RuntimeError, ValueError) as raised:
        return {"tokens": tokens, "format": name, "us": None, "build_us": None, "tb_s": None, "raised": str(raised)[:200]}
    return {"tokens": tokens, "format": name, "us": us, "build_us": built, "tb_s": _bytes(pairs[0]) / us / 1e6, "raised": ""}


def _bytes(pair: Any) -> int:
    return sum(part.nbytes for side in pair for part in (side if isinstance(side, tuple) else (side,)))


def _caches(tokens: int, scheme: tuple[int, int] | None) -> list[Any]:
    """What caches of `tokens` and one more hand out: so many that they are more than the GPU's cache holds, 8 at most."""
    pairs: list[Any] = []
    while len(pairs) < 8 and sum(map(_bytes, pairs)) < BEYOND_CACHE:
        pairs.append(filled(tokens, None if scheme is None else Affine(*scheme)).update_and_fetch(*_random(1)))
        mx.eval(pairs[-1])
    return pairs


def filled(tokens: int, form: Form | None) -> Any:
    """A cache that holds random keys and values."""
    cache = KVCache() if form is None else fresh(KVCache(), form)
    for start in range(0, tokens, 8192):
        mx.eval(cache.update_and_fetch(*_random(min(8192, tokens - start))))
    return cache


def _random(tokens: int) -> tuple[mx.array, mx.array]:
    return tuple(mx.random.normal((1, KV_HEADS, tokens, DIM)).astype(mx.bfloat16) for _ in range(2))


def model() -> list[dict[str, Any]]:
    """Steps of an 8B-shaped model, by scheme."""
    from . import decode_model

    result = decode_model.run()
    for text in result["warnings"]:
        print(text)
    return result["rows"]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {"self-test": self_test, "steps": run, "sweep": sweep, "model": model}


def part(name: str) -> list[dict[str, Any]]:
    """The rows of one of `PARTS`, printed as soon as they are there."""
    started = time.perf_counter()
    rows = PARTS[name]()
    print(report.table(rows))
    print(f"{name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    return rows
