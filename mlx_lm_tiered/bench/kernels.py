"""Decode attention on a GPU: microseconds of one step's, by KV scheme and context, and the steps of a whole model.

Timing: CALLS attentions are chained, each output the next one's queries, and evaluated
at once, as the layers of a decode step are; the time is the whole evaluation's, from
Python's building of the graph to the last result, over CALLS; `build_us` of it is
Python's, during which the GPU does nothing here, while in a decode loop it works on the
token before. The calls go round over caches that together exceed the GPU's own cache,
as the layers of a model do. What is measured is the median of REPEATS such chains,
after two that are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_lm_tiered.kernels import encode
from mlx_lm_tiered.kernels.check import error, tolerance
from mlx_lm_tiered.kernels.choice import Kernels
from mlx_lm_tiered.kernels.decode import Format, Step
from mlx_lm_tiered.kernels.layout import AFFINE_BITS, AFFINE_GROUPS, Layout
from mlx_lm_tiered.kernels.tuning import TOKENS, Tuning
from mlx_lm_tiered.schemes.attention import build, caches_use
from mlx_lm_tiered.schemes.convert import fresh
from mlx_lm_tiered.schemes.held import HeldRecords
from mlx_lm_tiered.schemes.spec import Affine, Form, parse
from mlx_lm_tiered.turboquant.codebooks import KEY_BITS, VALUE_BITS

from . import report

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
CALLS, REPEATS = 32, 9
CHUNK = 2048
BEYOND_CACHE, PASS = 256 << 20, 2 << 30
CONTEXTS, SCHEMES = (4096, 16384, 65536, 131072), ("bf16", "affine:8", "affine:4", "turbo")
# Warps a block and resident blocks, each compiled; and splits.
SHAPES = ((2, 8), (4, 3), (4, 4), (8, 2))
SPLITS = (16, 24, 33, 49, 66, 99, 128)


def form_of(layout: Layout, dim: int = DIM, each: int = HEADS // KV_HEADS, queries: mx.Dtype = mx.bfloat16, scales: mx.Dtype = mx.bfloat16, masked: bool = False) -> Format:
    """What a model with such heads asks for, over records, as caches keep them there."""
    return Format(layout, dim, each, queries, mx.float16 if layout.turbo else scales, dim**-0.5, masked, True)


def forms() -> list[Format]:
    """Every format at head dimension 128, others at fewer."""
    found = [form_of(Layout.affine(bits, group)) for bits in AFFINE_BITS for group in AFFINE_GROUPS]
    found += [form_of(Layout.turboquant(8, bits)) for bits in VALUE_BITS] + [form_of(Layout.turboquant(bits, 3)) for bits in KEY_BITS if bits != 8]
    found += [
        form_of(Layout.affine(8, 64), 64, 1, mx.float32, mx.float32), form_of(Layout.affine(4, 32), 96, 12, mx.float16, mx.float16),
        form_of(Layout.affine(4, 64), 256, 8, mx.float32), form_of(Layout.affine(8, 64), 512, 2), form_of(Layout.turboquant(8, 3), 64, 1, mx.float32),
        form_of(Layout.turboquant(8, 3), 256, 8, mx.float16), form_of(Layout.turboquant(8, 3), 512, 2),
    ]  # fmt: skip
    return found + [form_of(layout, masked=True) for layout in (Layout.affine(4, 64), Layout.affine(8, 64), Layout.turboquant(8, 3))]


def self_test() -> list[dict[str, Any]]:
    """Every one of `forms`, some over planes, some over records in blocks, and every shape of a block; and every encoding. The error's text where one does not compile or run."""
    cases: list[tuple[Format, Tuning | None]] = [(form, None) for form in forms()]
    layouts = (Layout.affine(8, 64), Layout.affine(4, 64), Layout.turboquant(8, 3))
    cases += [(form_of(layout, masked=masked)._replace(records=False), None) for layout in layouts for masked in (False, True)]
    cases += [(form_of(layout)._replace(block=block), None) for layout in layouts for block in (256, 16, 5)]
    cases += [(form_of(layout), Tuning(warps, 7, resident)) for layout in layouts for warps, resident in SHAPES]
    rows = _encodings()
    for form, tuning in cases:
        started = time.perf_counter()
        try:
            found, text = error(form, tuning), ""
        except (RuntimeError, ValueError) as raised:
            found, text = float("nan"), str(raised)
        name = f"{form.layout} d {form.dim} x {form.each} {form.queries}{' masked' if form.masked else ''}{'' if form.records else ' planes'}{f' blocks of {form.block}' if form.block else ''}{f' {tuning}' if tuning else ''}"
        rows.append({"format": name, "ok": found <= tolerance(form), "error": found, "seconds": time.perf_counter() - started, "raised": text})
    return rows


def _encodings() -> list[dict[str, Any]]:
    """Of each of `forms`' records, whether the kernel gives mlx's bytes, and by which rounding."""
    rows = []
    for one in dict.fromkeys(encode.Form(form.record, KV_HEADS, form.queries if form.layout.turbo else form.scales) for form in forms()):
        started = time.perf_counter()
        try:
            found, text = encode.right(one), ""
        except (RuntimeError, ValueError) as raised:
            found, text = None, str(raised)
        name = f"encoding {one.record.layout} d {one.dim} {one.dtype} {found and tuple(found)}"
        rows.append({"format": name, "ok": found is not None, "error": 0.0 if found else float("nan"), "seconds": time.perf_counter() - started, "raised": text})
    return rows


def run(contexts: Sequence[int] = CONTEXTS, schemes: Sequence[str] = SCHEMES) -> list[dict[str, Any]]:
    """One row a context and scheme, and one of mlx-lm's own way for affine ones.

    `us` are microseconds a step, `tb_s` the terabytes a second of KV that it reads, `of_limit` that over what a pass of mlx's over memory reaches.
    """
    rows = []
    limit = memory_tb_s()
    for tokens in contexts:
        for scheme in schemes:
            form = parse(scheme).form
            pairs = _caches(tokens, form)
            if form is None:
                rows.append(_row(tokens, scheme, pairs, lambda q, pair: mx.fast.scaled_dot_product_attention(q, *pair, scale=SCALE)))
                continue
            rows.append(_row(tokens, scheme, pairs, _kernel(form.layout, None)))
            if isinstance(form, Affine):
                full = [tuple(tuple(mx.contiguous(part) for part in side) for side in pair) for pair in pairs[:1]]
                mx.eval(full)
                theirs = lambda q, pair, form=form: base.quantized_scaled_dot_product_attention(
                    q + 0, *pair, scale=SCALE, mask=None, group_size=form.group_size, bits=form.bits
                )
                rows.append(_row(tokens, f"mlx-lm {scheme}, full cache", full, theirs))
    for row in rows:
        row["of_limit"] = row["tb_s"] and row["tb_s"] / limit
    return rows


def memory_tb_s() -> float:
    """Terabytes a second that mlx reads and writes when it adds a number to PASS bytes."""
    array = mx.zeros((PASS // 2,), mx.float16)
    mx.eval(array)
    times = []
    for _ in range(2 + REPEATS):
        started = time.perf_counter()
        mx.eval(array + 1)
        times.append(time.perf_counter() - started)
    return 2 * PASS / median(times[2:]) / 1e12


def sweep(contexts: Sequence[int] = CONTEXTS, schemes: Sequence[str] = SCHEMES[1:]) -> list[dict[str, Any]]:
    """The best number of splits for each context, scheme, and shape of a block, best first."""
    rows = []
    for tokens in contexts:
        for scheme in schemes:
            form = parse(scheme).form
            assert form is not None
            pairs, layout = _caches(tokens, form), form.layout
            found, failed = [], set()
            for warps, resident in SHAPES:
                for splits in SPLITS:
                    if splits * warps * TOKENS <= tokens:
                        try:
                            us, built = measure(_kernel(layout, Tuning(warps, splits, resident)), pairs, repeats=5)
                        except (RuntimeError, ValueError) as raised:
                            failed.add(f"warps {warps}, resident {resident}: {raised}")
                            break
                        found.append((us - built, built, warps, splits, resident))
            best: dict[tuple[int, int], tuple[float, float, int, int, int]] = {}
            for one in sorted(found):
                best.setdefault((one[2], one[4]), one)
            rows += [
                {"tokens": tokens, "scheme": scheme, "us": us + built, "build_us": built, "warps": w, "splits": s, "resident": r} for us, built, w, s, r in best.values()
            ]
            for text in sorted(failed):
                print(f"{scheme}: {text[:600]}")
    return rows


def measure(attend: Callable[[mx.array, Any], mx.array], pairs: Sequence[Any], repeats: int = REPEATS, batch: int = 1, length: int = 1) -> tuple[float, float]:
    """Microseconds of one attention, as the module says; and those of them that Python took to build the graph."""
    q = mx.random.normal((batch, HEADS, length, DIM)).astype(mx.bfloat16)
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


def _kernel(layout: Layout, tuning: Tuning | None) -> Callable[[mx.array, Any], mx.array]:
    step = Step(1, KV_HEADS, form_of(layout))
    return lambda q, pair: step.over_records(q, pair[0].buffers[0], pair[0].slots, None, tuning)


def _row(tokens: int, name: str, pairs: Sequence[Any], attend: Callable[[mx.array, Any], mx.array]) -> dict[str, Any]:
    try:
        us, built = measure(attend, pairs)
    except (RuntimeError, ValueError) as raised:
        return {"tokens": tokens, "scheme": name, "us": None, "build_us": None, "tb_s": None, "raised": str(raised)[:200]}
    return {"tokens": tokens, "scheme": name, "us": us, "build_us": built, "tb_s": _bytes(pairs[0]) / us / 1e6, "raised": ""}


def _bytes(pair: Any) -> int:
    if isinstance(pair[0], HeldRecords):
        rows, heads, _, words = pair[0].buffers[0].shape
        return 4 * rows * heads * pair[0].slots * words
    return sum(part.nbytes for side in pair for part in (side if isinstance(side, tuple) else (side,)))


def _caches(tokens: int, form: Form | None) -> list[Any]:
    """What caches of `tokens` and one more hand out: so many that they are more than the GPU's cache holds, 8 at most."""
    pairs: list[Any] = []
    with in_use(Kernels()):
        while len(pairs) < 8 and sum(map(_bytes, pairs)) < BEYOND_CACHE:
            pairs.append(filled(tokens, form).update_and_fetch(*_random(1)))
            mx.eval([side.buffers if isinstance(side, HeldRecords) else side for side in pairs[-1]])
    return pairs


@contextmanager
def in_use(kernels: Kernels) -> Iterator[None]:
    """Caches as they are where these kernels read them."""
    caches_use(kernels)
    try:
        yield
    finally:
        caches_use(Kernels("off"))


def plain_caches(tokens: int) -> list[Any]:
    """What plain caches of so many tokens hand out."""
    return _caches(tokens - 1, None)


def filled(tokens: int, form: Form | None) -> Any:
    """A cache that holds random keys and values."""
    cache = KVCache() if form is None else fresh(KVCache(), form)
    for start in range(0, tokens, 8192):
        cache.update_and_fetch(*_random(min(8192, tokens - start)))
        mx.eval(cache.state)
    return cache


def _random(tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (mx.random.normal((1, KV_HEADS, tokens, DIM)).astype(mx.bfloat16) for _ in range(2))
    return keys, values


def prefill(contexts: Sequence[int] = (4096, 16384, 32768), schemes: Sequence[str] = SCHEMES) -> list[dict[str, Any]]:
    """Attention of a prefill's chunk of CHUNK queries, the context's last ones, in milliseconds; and bytes allocated for it, of which the outputs are some."""
    rows = []
    for tokens in contexts:
        for scheme in schemes:
            form = parse(scheme).form
            queries = mx.random.normal((1, HEADS, CHUNK, DIM)).astype(mx.bfloat16)
            with in_use(kernels := Kernels()):
                held = filled(tokens - CHUNK, form)
                keys, values = held.update_and_fetch(*_random(CHUNK))
                mx.eval(queries, held.state)
            attend = build(base.quantized_scaled_dot_product_attention, kernels)

            def chunk(keys: Any = keys, values: Any = values, attend: Any = attend, form: Any = form, queries: mx.array = queries) -> mx.array:
                if form is None:
                    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")
                return attend(queries, keys, values, SCALE, "causal", form.group_size, form.bits)

            times, peak = [], 0
            for _ in range(2 + REPEATS):
                mx.reset_peak_memory()
                before, started = mx.get_active_memory(), time.perf_counter()
                mx.eval(chunk())
                times.append(time.perf_counter() - started)
                peak = mx.get_peak_memory() - before
            rows.append({"tokens": tokens, "scheme": scheme, "ms": median(times[2:]) * 1e3, "peak_bytes": peak})
    return rows


def model() -> list[dict[str, Any]]:
    """Steps of an 8B-shaped model, by scheme."""
    from . import decode_model

    result = decode_model.run()
    for text in result["warnings"]:
        print(text)
    return result["rows"]


def over_blocks() -> list[dict[str, Any]]:
    """Attention over blocks of plain keys and values."""
    from . import block_kernels

    return block_kernels.run()


def sweep_over_blocks() -> list[dict[str, Any]]:
    """Every way to cut that up."""
    from . import block_kernels

    return block_kernels.sweep()


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "self-test": self_test, "steps": run, "sweep": sweep, "model": model, "prefill": prefill, "blocks": over_blocks, "blocks-sweep": sweep_over_blocks
}  # fmt: skip


def part(name: str) -> list[dict[str, Any]]:
    """The rows of one of `PARTS`, printed as soon as they are there."""
    started = time.perf_counter()
    rows = PARTS[name]()
    print(report.table(rows))
    print(f"{name}: {time.perf_counter() - started:.0f} s\n", flush=True)
    return rows
