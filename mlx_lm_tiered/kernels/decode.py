"""Decode attention by the kernel of `source.py`, over the very arrays that a quantized cache hands out: planes, or records (`records.py`), also in blocks that a table lists.

The kernel takes the arrays' strides, so nothing is made contiguous; and how many tokens
they hold is an argument, so nothing is sliced out, or compiled anew from one token to
the next. On CUDA the last block of a head merges the splits, elsewhere a second kernel:
it takes an order of memory between blocks that Metal does not promise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import mlx.core as mx

from . import source
from .layout import Layout, table
from .records import Record, record_of
from .tuning import Tuning, choose

LARGEST_DIM = 512
# Of larger heads a block computes this many dimensions of the output.
CHUNK = 256
MOST_SPLITS = 128
# What a warp reads at a time.
LEAST_TOKENS = 16
PLANES = ("kp", "ks", "kb", "vp", "vs", "vb")
PARTS = ("po", "pm", "pl")
# Counters that calls take in turns, so that calls that run at once, of which there are never so many, have different ones; and their least size, below which
# mlx keeps an array in the host's memory.
COUNTERS, LEAST_COUNTERS = 64, 64
# Bytes of shared memory a block may have. And elements from which on mlx passes every array in the same address space: to a Metal kernel
# it passes smaller ones as constants, and the cache's own are read as device memory.
MOST_SHARED = {"cuda": 48 << 10, "metal": 32 << 10}
LEAST_ELEMENTS = {"cuda": 1, "metal": 8}
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


@cache
def dialect() -> str:
    """Of the device's kernels: "metal" or "cuda"."""
    return "metal" if mx.metal.is_available() else "cuda"


class Format(NamedTuple):
    """What a kernel is compiled for."""

    layout: Layout
    dim: int
    each: int  # query heads of a KV head
    queries: mx.Dtype
    scales: mx.Dtype
    scale: float
    masked: bool = False
    records: bool = False
    block: int = 0  # tokens of a block of records, which a table lists; 0 where a row's lie one after another

    @property
    def record(self) -> Record:
        """What it is kept in, if so."""
        found = record_of(self.layout, self.dim, self.dim, self.scales)
        assert found is not None
        return found


def supports(queries: mx.array, keys: Any, values: Any, slots: int, layout: Layout, mask: Any, sinks: Any) -> bool:
    """Whether the kernel computes this: one query a row, keys and values of one head dimension, a boolean mask over tokens or none."""
    if not layout.fits(keys, values, queries.shape[3]) or keys[1].dtype not in _FLOATS or values[1].dtype != keys[1].dtype:
        return False
    return _supports(queries, keys[0].shape[1], slots, layout, keys[1].dtype, False, mask, sinks)


def supports_records(queries: mx.array, held: mx.array, record: Record, slots: int, mask: Any, sinks: Any) -> bool:
    """As `supports`, over records (rows, heads, tokens, words)."""
    if not record.key_dim == record.value_dim == queries.shape[3]:
        return False
    return _supports(queries, held.shape[1], slots, record.layout, record.numbers, True, mask, sinks)


def supports_listed(queries: mx.array, held: mx.array, record: Record, table: mx.array, lengths: mx.array, block: int) -> bool:
    """Whether the kernel computes this (see `decode_listed`): one query a row, over records (1, heads, blocks * block, words); int32 tables and lengths."""
    rows = queries.shape[0]
    if table.ndim != 2 or lengths.ndim != 1 or table.dtype != mx.int32 or lengths.dtype != mx.int32 or table.shape[0] < rows or lengths.shape[0] < rows or not table.shape[1]:
        return False
    if block < 1 or held.shape[0] != 1 or held.shape[2] % block or min(queries.size, held.size) < LEAST_ELEMENTS[dialect()] or not record.key_dim == record.value_dim == queries.shape[3]:
        return False
    return _computes(queries, held.shape[1], record.layout, record.numbers, True)


def _supports(queries: mx.array, kv_heads: int, slots: int, layout: Layout, scales: mx.Dtype, records: bool, mask: Any, sinks: Any) -> bool:
    return sinks is None and _computes(queries, kv_heads, layout, scales, records) and may_serve(queries.shape[0], kv_heads, slots, queries.shape[3], mask)


def _computes(queries: mx.array, kv_heads: int, layout: Layout, scales: mx.Dtype, records: bool) -> bool:
    _, heads, length, dim = queries.shape
    if length != 1 or not layout.known or heads % kv_heads or queries.dtype not in _FLOATS or dim > LARGEST_DIM or (dim > CHUNK and dim % CHUNK):
        return False
    form = Format(layout, dim, heads // kv_heads, queries.dtype, scales, 1.0, records=records)
    return warps_that_fit(dialect(), form, 1) == 1


def may_serve(rows: int, kv_heads: int, slots: int, dim: int, mask: Any) -> bool:
    """What of that changes from step to step."""
    least = LEAST_ELEMENTS[dialect()]
    if slots < LEAST_TOKENS or slots * dim >= 1 << 31 or rows * kv_heads * slots < least:
        return False
    if not isinstance(mask, mx.array):
        # A causal mask hides nothing from the one last query.
        return mask is None or mask == "causal"
    return mask.dtype == mx.bool_ and rows * slots >= least and _per_token(mask, rows, slots) is not None


def _per_token(mask: mx.array, rows: int, slots: int) -> mx.array | None:
    """A mask as (rows, 1, 1, slots), or None where it has another form."""
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, rows) or shape[1:3] != (1, 1) or shape[3] != slots:
        return None
    return mx.broadcast_to(mask, (rows, 1, 1, slots))


@cache
def _nothing_hidden() -> mx.array:
    made = mx.ones((1, 1, 1, 1), mx.bool_)
    mx.eval(made)
    return made


def merged(language: str, form: Format) -> bool:
    """Whether one kernel does all."""
    return language == "cuda" and form.dim <= CHUNK


@cache
def warps_that_fit(language: str, form: Format, wanted: int) -> int:
    """At most `wanted` warps, and no more than whose outputs a block's memory holds beside queries and table (`decode.body`); 0 where one is too many."""
    tiles, parts = (1 if form.each <= 4 else 2), form.queries.size // 2
    queries = 4 * (8 * tiles * parts * (form.dim // 4 + 4) + 4 * tiles * (form.dim // form.layout.group_size + 1))
    each = 4 * min(form.each, 8) * (min(form.dim, CHUNK) + 10)
    left = MOST_SHARED[language] - queries - form.layout.table_bytes
    if merged(language, form):
        left -= 4 * (min(form.each, 8) * (MOST_SPLITS + 1) + 1)
    while wanted and wanted * each > left:
        wanted //= 2
    return wanted


class Options(NamedTuple):
    """What mlx is given besides arrays, and the constants of the texts."""

    parts: dict[str, Any]
    parts_constants: dict[str, Any]
    merge: dict[str, Any]
    merge_constants: dict[str, Any]
    bounds: tuple[int, int]  # warps and resident blocks


def scale_bits(scale: float) -> int:
    """A scale as the texts have it: its bits, so that nothing is rounded on the way."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


def options(language: str, rows: int, kv_heads: int, form: Format, tuning: Tuning) -> Options:
    """Of both kernels.

    The scale, of which a model has one or two, is compiled into them: as an array of one
    number it would be in the host's memory, and every block would wait for it.
    """
    layout, dim, heads = form.layout, form.dim, kv_heads * form.each
    chunks = max(1, dim // CHUNK)
    part = dim // chunks
    warps = warps_that_fit(language, form, tuning.warps)
    # Splits without tokens are right, and as many as these keep the merge's inputs from being small.
    splits = min(max(tuning.splits, LEAST_ELEMENTS[language]), MOST_SPLITS)
    parts_constants = {
        "D": dim, "CH": chunks, "KB": layout.key_bits, "VB": layout.value_bits, "GS": layout.group_size, "TURBO": int(layout.turbo), "G": form.each,
        "HK": kv_heads, "W": warps, "MASKED": int(form.masked), "SCALE": scale_bits(form.scale),
        "LOWERED": layout.lowered, "T": form.queries, "S": form.scales,
    }  # fmt: skip
    if form.records:
        codes, numbers = form.record.alignment
        parts_constants |= {"ROW": 4 * form.record.words, "CODES": codes, "NUMBERS": numbers, "LISTED": int(form.block > 0)}
    if form.block:
        parts_constants["BLOCK"] = form.block
    parts = {
        "grid": (splits * 32 * warps, rows * kv_heads, -(-form.each // 8) * chunks), "threadgroup": (32 * warps, 1, 1),
        "output_shapes": [(rows * heads * chunks, splits, part), (rows * heads * chunks, splits), (rows * heads * chunks, splits)],
        "output_dtypes": [mx.float32] * 3,
    }  # fmt: skip
    if merged(language, form):
        parts["output_shapes"] = [(rows, heads, 1, dim), (rows * heads * splits * (dim + 2),)]
        parts["output_dtypes"] = [form.queries, mx.float32]
    # What was rotated as a whole is merged as a whole; other chunks are so many more heads.
    size, of = (dim, 1) if layout.turbo else (part, chunks)
    threads = size * max(1, min(4, 1024 // size))
    merge_constants = {
        "D": size, "CH": dim // part if layout.turbo else 1, "PIECE": part if layout.turbo else layout.group_size, "THREADS": threads, "T": form.queries,
    }  # fmt: skip
    merge = {
        "grid": (rows * heads * of * threads, 1, 1), "threadgroup": (threads, 1, 1), "output_shapes": [(rows, heads, 1, dim)], "output_dtypes": [form.queries],
    }  # fmt: skip
    return Options(parts, parts_constants, merge, merge_constants, (warps, tuning.resident if warps == tuning.warps else 0))


def inputs(language: str, form: Format) -> tuple[str, ...]:
    """Names of what the first kernel is given."""
    held = (("kv", "book") if form.layout.turbo else ("kv",)) if form.records else PLANES
    tokens = ("listed", "lengths") if form.block else ("mask",)
    ending = (("done", "signs") if form.layout.turbo else ("done",)) if merged(language, form) else ()
    return ("q", *held, *tokens, *ending)


def texts(language: str, form: Format) -> tuple[str, ...]:
    """Files of the first kernel."""
    where = (("records.body",) if form.layout.turbo else ("records.body", "tableless.body")) if form.records else ("planes.body",)
    where = (*where, "listed.body" if form.block else "ordered.body")
    if not merged(language, form):
        return (*where, "decode.body")
    return ("scratch.body", *where, "decode.body", "last.body", "turned_back.body" if form.layout.turbo else "upright.body")


def kernels(language: str, form: Format, found: Options) -> tuple[Any, Any]:
    """mlx's two for these options; None for the second where the first does all."""
    alone = merged(language, form)
    parts = source.kernel(language, texts(language, form), tuple(found.parts_constants.items()), inputs(language, form), ("out", "parts") if alone else PARTS, found.bounds)
    if alone:
        return parts, None
    end, more = ("unrotated.body", ("signs",)) if form.layout.turbo else ("written.body", ())
    return parts, source.kernel(language, ("merge.body", end), tuple(found.merge_constants.items()), (*PARTS, *more), ("out",))


class Step:
    """Decode steps of one form: what about a call does not depend on how many tokens there are is found out once."""

    def __init__(self, rows: int, kv_heads: int, form: Format):
        self._rows, self._kv_heads, self._form = rows, kv_heads, form
        eights = -(-form.each // 8)
        self._units = rows * kv_heads * eights
        self._back = form.layout.back(form.dim)
        self._book = [table(form.layout.value_bits)] if form.layout.turbo else []
        self._language = dialect()
        self._calls: dict[Tuning, Callable[[list[mx.array]], mx.array]] = {}
        self._counters = counters(self._units) if merged(self._language, form) else None

    def __call__(self, queries: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], slots: int, mask: Any, tuning: Tuning | None = None) -> mx.array:
        """Attention (rows, heads, 1, dim) of `queries` of that shape over the first `slots` tokens of planes."""
        return self._call([queries, *self._form.layout.inputs(keys, values), self._seen(mask, slots)], slots, tuning)

    def over_records(self, queries: mx.array, held: mx.array, slots: int, mask: Any, tuning: Tuning | None = None) -> mx.array:
        """The same over records."""
        return self._call([queries, held, *self._book, self._seen(mask, slots)], slots, tuning)

    def over_blocks(self, queries: mx.array, held: mx.array, table: mx.array, lengths: mx.array, longest: int, tuning: Tuning | None = None) -> mx.array:
        """The same over the first `lengths[row]` tokens, `longest` at most, of the blocks that `table[row]` lists."""
        # In steps of 64, in which no split is won.
        return self._call([queries, held, *self._book, table, lengths], -(-longest // 64) * 64, tuning)

    def _seen(self, mask: Any, slots: int) -> mx.array:
        # The mask's length says how many tokens there are, also where it is not read.
        return _per_token(mask, self._rows, slots) if self._form.masked else mx.broadcast_to(_nothing_hidden(), (1, 1, 1, slots))  # type: ignore[return-value]

    def _call(self, inputs: list[mx.array], slots: int, tuning: Tuning | None) -> mx.array:
        form = self._form
        if tuning is None:
            tuning = choose(slots, self._units, form.dim, form.each, self._language)
        call = self._calls.get(tuning)
        if call is None:
            call = self._calls[tuning] = self._made(tuning)
        return call(inputs)

    def _made(self, tuning: Tuning) -> Callable[[list[mx.array]], mx.array]:
        found = options(self._language, self._rows, self._kv_heads, self._form, tuning)
        return launch(*kernels(self._language, self._form, found), found, self._counters, self._back)


def counters(units: int) -> Iterator[mx.array]:
    """Arrays of zeros for so many blocks to count in, to which kernels bring them back, in turns."""
    found = [mx.zeros((max(LEAST_COUNTERS, units),), mx.uint32) for _ in range(COUNTERS)]
    mx.eval(found)
    return cycle(found)


def launch(first: Any, second: Any, found: Options, turns: Iterator[mx.array] | None, back: Sequence[mx.array] = ()) -> Callable[[list[mx.array]], mx.array]:
    """A call of both kernels, or of the first where it does all, which then counts in one of `turns`. `back` goes to what merges."""
    if turns is not None:
        return lambda inputs: first(inputs=[*inputs, next(turns), *back], **found.parts)[0]
    return lambda inputs: second(inputs=[*first(inputs=inputs, **found.parts), *back], **found.merge)[0]


@cache
def _step(rows: int, kv_heads: int, form: Format) -> Step:
    return Step(rows, kv_heads, form)


def decode(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, layout: Layout, tuning: Tuning | None = None) -> mx.array:
    """Attention of `queries` (rows, heads, 1, dim) that `supports` accepts over a cache's arrays of keys and values. Returns their shape."""
    rows, heads, _, dim = queries.shape
    kv_heads = keys[0].shape[1]
    form = Format(layout, dim, heads // kv_heads, queries.dtype, keys[1].dtype, scale, isinstance(mask, mx.array))
    return _step(rows, kv_heads, form)(queries, keys, values, keys[0].shape[2], mask, tuning)


def decode_records(queries: mx.array, held: mx.array, record: Record, slots: int, scale: float, mask: Any, tuning: Tuning | None = None) -> mx.array:
    """The same over the first `slots` of records that `supports_records` accepts."""
    rows, heads, _, dim = queries.shape
    form = Format(record.layout, dim, heads // held.shape[1], queries.dtype, record.numbers, scale, isinstance(mask, mx.array), True)
    return _step(rows, held.shape[1], form).over_records(queries, held, slots, mask, tuning)


def decode_listed(
    queries: mx.array, held: mx.array, record: Record, table: mx.array, lengths: mx.array, scale: float, block: int, longest: int, tuning: Tuning | None = None
) -> mx.array:  # fmt: skip
    """The same over records in blocks, which `supports_listed` accepts: of a row the first `lengths[row]` tokens of the blocks that `table[row]` lists, `longest` at most.

    Nothing behind a row's length is read, of its table neither; zeros where that is 0. Tables and lengths are best made by `blocks.on_device`.
    """
    rows, heads, _, dim = queries.shape
    form = Format(record.layout, dim, heads // held.shape[1], queries.dtype, record.numbers, scale, records=True, block=block)
    return _step(rows, held.shape[1], form).over_blocks(queries, held, table, lengths, longest, tuning)
