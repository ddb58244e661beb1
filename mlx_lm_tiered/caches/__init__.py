"""Every cache class of mlx-lm as a kind, and what the tiers ask of a request's caches, one per layer.

All of this runs on the generation thread, which owns the arrays. Functions raise
`UnknownCacheClass` for caches without a kind; `check` asks beforehand.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..schemes.convert import leaves
from .affine import KINDS as AFFINE
from .attention import ChunkedKind, ConcatenateKind, PlainKind
from .batch import BatchKind, BatchRotatingKind
from .kind import Dump, InconsistentLength, Kind, Later, Tensor, UnknownCacheClass, kind_of, kinds, made, register, since
from .nested import ListKind, all_can_cut, check_depth, common_length, dump_all, lend_all, load_all
from .quantized import QuantizedKind
from .recurrent import ArraysKind, LayerKind
from .rotating import RotatingKind
from .turbo import KINDS as TURBO

__all__ = [
    "Dump", "Dumped", "InconsistentLength", "Kind", "Later", "Tensor", "UnknownCacheClass", "can_cut", "check", "dump", "kind_of",
    "kinds", "lend", "length", "load", "made", "merge_row", "minimum_reusable", "nbytes", "observe", "quantized", "register", "rest", "shared", "since",
    "signatures", "stay_cuttable", "stored_signatures",
]  # fmt: skip

for _kind in (
    PlainKind(), RotatingKind(), QuantizedKind(), ArraysKind(), ChunkedKind(), ListKind(), ConcatenateKind(), BatchKind(),
    BatchRotatingKind(), LayerKind(), *AFFINE, *TURBO,
):  # fmt: skip
    register(_kind)


class Dumped(NamedTuple):
    """Caches as JSON-able `descriptors`, one per cache, and named `tensors`.

    Names are layer, nested indices and field joined by dots: ``0.keys``, ``3.1.values``.
    """

    descriptors: list[dict[str, Any]]
    tensors: dict[str, Tensor]


def check(caches: Sequence[Any]) -> None:
    """Raise UnknownCacheClass unless every cache, nested ones included, has a kind."""
    signatures(caches)


def signatures(caches: Sequence[Any]) -> list[str]:
    """How each cache stores what it holds."""
    return [kind_of(c).signature(c) for c in caches]


def stored_signatures(caches: Sequence[Any]) -> list[str]:
    """How what is stored of each is stored."""
    return [kind_of(c).stored_signature(c) for c in caches]


def length(caches: Sequence[Any]) -> int | None:
    """The tokens every non-empty counting cache holds; None if none counts. Raises InconsistentLength."""
    return common_length(caches)


def can_cut(caches: Sequence[Any], n: int) -> bool:
    """Whether `lend(caches, n)` gives the state of a fresh run over the first `n` tokens.

    Always true for n == length(caches). Caches of which none counts (purely
    recurrent models) answer False for every n: their owner knows how many tokens
    they hold, and may lend them whole.
    """
    return all_can_cut(caches, n)


def quantized(caches: Sequence[Any]) -> bool:
    """Whether a scheme has quantized what it quantizes of them."""
    return any(kind_of(leaf).quantized(leaf) for leaf in leaves(caches))


def stay_cuttable(caches: Sequence[Any]) -> bool:
    """Whether a longer run of these caches will serve every prefix that they serve now."""
    return all(kind_of(c).stays_cuttable(c) for c in caches)


def minimum_reusable(caches: Sequence[Any]) -> int:
    """No prefix of fewer tokens than this may be reused."""
    return max((kind_of(c).minimum_reusable(c) for c in caches), default=0)


def lend(caches: Sequence[Any], n: int | None = None) -> list[Any]:
    """New caches over the same buffers, whole or cut to `n` tokens; the lender's stay as they are.

    Raises ValueError when they cannot be cut to `n`.
    """
    if n is not None and not can_cut(caches, n):
        raise ValueError(f"these caches cannot be cut to {n} tokens")
    return lend_all(caches, n)


def nbytes(caches: Sequence[Any]) -> int:
    """Bytes of all arrays, slack included."""
    return sum(kind_of(c).nbytes(c) for c in caches)


def shared(caches: Sequence[Any]) -> dict[Hashable, int]:
    """What of their bytes other caches may hold as well (see `Kind.shared`)."""
    return {name: size for c in caches for name, size in kind_of(c).shared(c).items()}


def dump(caches: Sequence[Any]) -> Dumped:
    """Everything the caches hold. The arrays are lazy views, or made later, valid as long as the caches are not written to."""
    return Dumped(*dump_all(caches))


def load(descriptors: list[dict[str, Any]], arrays: Mapping[str, mx.array]) -> list[Any]:
    """The caches that were dumped, over `arrays`, which the caller gives up.

    Nothing is trusted: types, ranges, shapes, kinds and nesting are checked, and
    names left over refused. Arrays may be longer than dumped along their grow
    axis; the next tokens are then written there in place. Raises ValueError with
    one sentence.
    """
    check_depth(descriptors)
    return load_all(descriptors, arrays)


def observe(caches: Sequence[Any]) -> None:
    """Note conversions that bound reuse; called after each chunk of a prefill."""
    for c in caches:
        kind_of(c).observe(c)


def rest(caches: Sequence[Any]) -> None:
    """The caches are stored: nothing will be written to them any more."""
    for c in caches:
        kind_of(c).rest(c)


def merge_row(caches: Sequence[Any]) -> list[Any] | None:
    """The batch form of one request's caches over the same arrays, which the caller gives up.

    Behaves as upstream's merge of one row, which copies. None, with the caches
    untouched, when upstream must merge (or refuse) them itself.
    """
    rows = [kind_of(c).row(c) for c in caches]
    return None if any(row is None for row in rows) else rows
