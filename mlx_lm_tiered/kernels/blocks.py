"""Decode attention over blocks of plain keys and values, by a table, without gathering them: `blocks.body`, merged as `decode.py` does.

Per block of threads: up to 8 queries of one KV head of one row, of several heads and, to
verify drafts, of several tokens. Each warp takes 16 tokens at a time; warps of all splits
take turns. Both products are tensor-core ones, of numbers as they are loaded: 16-bit keys
times queries are exact, sums are in fp32, and a weight is two numbers of the values'
type. fp32 goes in as three numbers of bf16 each. Which dimension goes to which row of a
fragment is ours to choose, so each lane loads 16 bytes at a time and exchanges none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from . import source
from .decode import LEAST_ELEMENTS, MOST_SHARED, MOST_SPLITS, PARTS, Options, counters, dialect, launch, scale_bits
from .tuning import METAL_BLOCKS, MULTIPROCESSORS, TOKENS, Tuning

DIMS = (64, 80, 96, 128, 256)
MOST_EACH, MOST_LENGTH = 16, 8
INPUTS = ("q", "keys", "values", "table", "lengths")
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)
# Blocks of four warps that a multiprocessor's registers hold, by the bytes of a head up to which they do.
RESIDENT = ((192, 4), (256, 3), (1024, 2))


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dim: int
    each: int  # query heads of a KV head
    block: int  # tokens of a block
    dtype: mx.Dtype
    scale: float
    length: int = 1  # queries of a head
    heads_first: bool = False  # in the arenas

    @property
    def shared(self) -> int:
        """Queries of a KV head."""
        return self.each * self.length


def supports(queries: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, block: int | None = None) -> bool:
    """Whether the kernel computes this (see `decode`): heads of `DIMS`, up to 16 a KV head and 8 queries a head, all of one type; int32 tables and lengths."""
    if queries.ndim != 4 or keys.ndim != 4 or table.ndim != 2 or lengths.ndim != 1:
        return False
    rows, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    if not 1 <= length <= MOST_LENGTH or keys.shape != values.shape or keys.shape[3] != dim or dim not in DIMS or heads % kv_heads or heads // kv_heads > MOST_EACH:
        return False
    if block is not None and (keys.shape[0] != 1 or block < 1 or keys.shape[2] % block):
        return False
    if table.dtype != mx.int32 or lengths.dtype != mx.int32 or table.shape[0] < rows or lengths.shape[0] < rows or not table.shape[1]:
        return False
    return queries.dtype in _FLOATS and queries.dtype == keys.dtype == values.dtype and min(queries.size, keys.size) >= LEAST_ELEMENTS[dialect()]


def on_device(numbers: Any, shape: Sequence[int] | None = None) -> mx.array:
    """A table or lengths from Python, int32, so that a GPU reads it from its own memory; lazily, once for all layers of a step.

    Every block of every layer waits for these. mlx leaves what Python made in the host's
    memory, and anything of 8 bytes or fewer: so lengths are made longer, and both are
    computed. Entries behind those of the rows are not read.
    """
    made = mx.array(numbers, mx.int32)
    if made.ndim == 1:
        made = mx.pad(made, (0, max(0, 8 - made.shape[0])))
    elif made.shape[-1] < 8:
        made = mx.pad(made, [(0, 0), (0, 8 - made.shape[-1])])
    return made * 1


def queries_of_a_block(form: Form) -> int:
    """As in `blocks.body`."""
    return min(form.shared, 4 if form.dtype == mx.float32 else 8)


def merged(language: str, form: Form) -> bool:
    """Whether one kernel does all."""
    return language == "cuda" and form.dim % 32 == 0


@cache
def warps_that_fit(language: str, form: Form, wanted: int) -> int:
    """At most `wanted` warps, and no more than whose outputs a block's memory holds beside its queries (`blocks.body`)."""
    sets = 2 if form.dtype == mx.float32 else 1
    left = MOST_SHARED[language] - 4 * sets * 8 * (form.dim // 2 + 8)
    if merged(language, form):
        left -= 4 * (queries_of_a_block(form) * (MOST_SPLITS + 1) + 1)
    while wanted > 1 and wanted * 4 * queries_of_a_block(form) * (form.dim + 10) > left:
        wanted //= 2
    return wanted


def choose(tokens: int, units: int, form: Form, language: str = "cuda") -> Tuning:
    """For rows of up to `tokens`; `units` are rows times KV heads times blocks of queries."""
    warps, resident = 4, next(count for size, count in RESIDENT if form.dim * form.dtype.size <= size)
    most = max(1, (METAL_BLOCKS if language == "metal" else MULTIPROCESSORS * resident) // units)
    return Tuning(warps, max(1, min(most, MOST_SPLITS, -(-tokens // (TOKENS * warps)))), resident if language == "cuda" else 0)


def options(language: str, rows: int, kv_heads: int, form: Form, tuning: Tuning) -> Options:
    """Of both kernels. The scale is compiled into them, as in `decode.options`."""
    dim, heads, all_queries = form.dim, kv_heads * form.each, rows * kv_heads * form.shared
    warps = warps_that_fit(language, form, tuning.warps)
    # Splits without tokens are right, and as many as these keep the merge's inputs from being small.
    splits = min(max(tuning.splits, LEAST_ELEMENTS[language]), MOST_SPLITS)
    parts_constants = {
        "D": dim, "G": form.shared, "L": form.length, "HK": kv_heads, "BLOCK": form.block, "HEADS_FIRST": int(form.heads_first), "W": warps, "SCALE": scale_bits(form.scale),
        "S": form.dtype, "H": mx.bfloat16 if form.dtype == mx.float32 else form.dtype,
    }  # fmt: skip
    parts = {
        "grid": (splits * 32 * warps, rows * kv_heads, -(-form.shared // queries_of_a_block(form))), "threadgroup": (32 * warps, 1, 1),
        "output_shapes": [(all_queries, splits, dim), (all_queries, splits), (all_queries, splits)], "output_dtypes": [mx.float32] * 3,
    }  # fmt: skip
    if merged(language, form):
        parts_constants["T"] = form.dtype
        parts["output_shapes"] = [(rows, heads, form.length, dim), (all_queries * splits * (dim + 2),)]
        parts["output_dtypes"] = [form.dtype, mx.float32]
    threads = 4 * dim
    # Parts have their dimensions in order, which is what these pieces mean to the merge.
    merge_constants = {"D": dim, "CH": 1, "PIECE": 16, "THREADS": threads, "T": form.dtype}
    merge = {"grid": (all_queries * threads, 1, 1), "threadgroup": (threads, 1, 1), "output_shapes": [(rows, heads, form.length, dim)], "output_dtypes": [form.dtype]}
    return Options(parts, parts_constants, merge, merge_constants, (warps, tuning.resident if warps == tuning.warps else 0))


def texts(language: str, form: Form) -> tuple[str, ...]:
    """Files of the first kernel."""
    return ("scratch.body", "blocks.body", "last.body", "upright.body") if merged(language, form) else ("blocks.body",)


def inputs(language: str, form: Form) -> tuple[str, ...]:
    """Names of what the first kernel is given."""
    return (*INPUTS, "done") if merged(language, form) else INPUTS


def kernels(language: str, form: Form, found: Options) -> tuple[Any, Any]:
    """mlx's two for these options; None for the second where the first does all."""
    alone = merged(language, form)
    outputs = ("out", "parts") if alone else PARTS
    parts = source.kernel(language, texts(language, form), tuple(found.parts_constants.items()), inputs(language, form), outputs, found.bounds)
    if alone:
        return parts, None
    return parts, source.kernel(language, ("merge.body", "written.body"), tuple(found.merge_constants.items()), PARTS, ("out",))


class Step:
    """Decode steps of one form: what about a call does not depend on how many tokens there are is found out once."""

    def __init__(self, rows: int, kv_heads: int, form: Form):
        self._rows, self._kv_heads, self._form = rows, kv_heads, form
        self._units = rows * kv_heads * -(-form.shared // queries_of_a_block(form))
        self._language = dialect()
        self._counters = counters(self._units) if merged(self._language, form) else None
        self._calls: dict[Tuning, Callable[[list[mx.array]], mx.array]] = {}
        self._tuned: dict[int, Callable[[list[mx.array]], mx.array]] = {}

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, longest: int | None = None, tuning: Tuning | None = None
    ) -> mx.array:
        """Attention (rows, heads, length, dim) of `queries` of that shape over the first `lengths[row]` tokens of the blocks in `table[row]`."""
        inputs = [queries, keys, values, table, lengths]
        if self._language == "metal":
            # mlx passes small arrays in another address space, to another text.
            inputs[3:] = [on_device(a) if a.shape[-1] < 8 else a for a in inputs[3:]]
        if tuning is None:
            # In steps of 64, in which no split is won.
            tokens = -(-(table.shape[1] * self._form.block if longest is None else longest) // 64)
            call = self._tuned.get(tokens)
            if call is None:
                call = self._tuned[tokens] = self._made(choose(64 * tokens, self._units, self._form, self._language))
            return call(inputs)
        return self._made(tuning)(inputs)

    def _made(self, tuning: Tuning) -> Callable[[list[mx.array]], mx.array]:
        call = self._calls.get(tuning)
        if call is None:
            call = self._calls[tuning] = self._compiled(tuning)
        return call

    def _compiled(self, tuning: Tuning) -> Callable[[list[mx.array]], mx.array]:
        found = options(self._language, self._rows, self._kv_heads, self._form, tuning)
        return launch(*kernels(self._language, self._form, found), found, self._counters)


@cache
def step(rows: int, kv_heads: int, form: Form) -> Step:
    """The one of a form."""
    return Step(rows, kv_heads, form)


def form_of(queries: mx.array, keys: mx.array, scale: float, block: int | None = None) -> Form:
    """What is compiled for these."""
    _, heads, length, dim = queries.shape
    return Form(dim, heads // keys.shape[1], keys.shape[2] if block is None else block, queries.dtype, scale, length, block is not None)


def decode(
    queries: mx.array, keys: mx.array, values: mx.array, table: mx.array, lengths: mx.array, scale: float,
    block: int | None = None, longest: int | None = None, tuning: Tuning | None = None,
) -> mx.array:  # fmt: skip
    """Attention of what `supports` accepts: queries (rows, heads, length, dim) over the first `lengths[row]` tokens of the blocks that `table[row]` lists.

    The queries are of a row's last tokens, which its length counts: each sees the tokens up
    to its own. Arenas are (blocks, kv_heads, block, dim), or with `block`
    (1, kv_heads, blocks * block, dim); the last two axes are contiguous. `longest` bounds the
    lengths, for the work to be cut up; without it the table's room does. Nothing behind a
    row's length is read, of its table neither. Tables and lengths may have more rows, and are
    best made by `on_device`. Returns the shape and type of `queries`; zeros for a query that
    sees no token.
    """
    return step(queries.shape[0], keys.shape[1], form_of(queries, keys, scale, block))(queries, keys, values, table, lengths, longest, tuning)
