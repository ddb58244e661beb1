"""The door of the tiers, where the length of a key and the offsets of its caches must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import caches as kinds
from ..statistics import Statistics


def agreeing(tokens: Sequence[int], caches: list[Any], statistics: Statistics) -> tuple[list[Any], int]:
    """The caches, and how many of `tokens` they hold; 0 when they cannot be stored.

    Upstream's speculative path stores a key that is one longer than its caches,
    whose lengths differ by one between the models. They hold the key's first
    tokens, so what they agree on is kept; what cannot be cut to it is refused.
    """
    parts = [(cache, kinds.kind_of(cache)) for cache in caches]
    lengths = [kind.length(cache) for cache, kind in parts]
    counted = [n for n in lengths if n is not None]
    held = min([len(tokens), *counted])
    if held == len(tokens) and all(n == held for n in counted):
        return caches, held
    if held == 0 or not all(n == held or kind.can_cut(cache, held) for (cache, kind), n in zip(parts, lengths, strict=True)):
        statistics.fault("length_mismatch", f"caches of {sorted(set(counted))} tokens came with a key of {len(tokens)}; not stored")
        return caches, 0
    statistics.count("keys_shortened")
    return [cache if n == held else kind.lend(cache, held) for (cache, kind), n in zip(parts, lengths, strict=True)], held
