"""What a request would find, asked from outside: nothing is lent, read, counted as a lookup or made younger."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .ram import RamTier, usable_by


class Look(NamedTuple):
    """What one tier has for a prompt: it would serve `hit` leading tokens.

    The stored sequence that shares most leading tokens has `length`, shares `common`
    and on disk lies in `file` (FINGERPRINT/NAME); all empty when nothing is stored.
    """

    hit: int = 0
    length: int = 0
    common: int = 0
    file: str = ""


def look_in_ram(ram: RamTier, namespace: Hashable, tokens: Sequence[int], key: bytes) -> Look:
    """The same for the RAM tier. Any thread."""
    index = ram.index_of(namespace)
    best = index.best(key, usable_by(tokens))
    closest = index.closest(key)
    hit = best[1] if best is not None else 0
    return Look(hit, closest[0].length, closest[1]) if closest is not None else Look(hit)
