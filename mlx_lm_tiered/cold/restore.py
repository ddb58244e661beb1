"""From a stored entry back to caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .. import caches as kinds
from .catalog import ColdEntry
from .format import BadEntry, ForeignEntry, Meta
from .health import Checking
from .reader import open_entry


class Replaced(Exception):
    """The file holds something else than the entry that was asked for."""


class Damaged(Exception):
    """The file is not sound; `status` says which file that was, `str()` why."""

    def __init__(self, reason: str, status: os.stat_result):
        super().__init__(reason)
        self.status = status


def read_caches(entry: ColdEntry, checking: Checking, used: Callable[[int], None]) -> list[Any]:
    """An entry's caches, from its file; `used` gets the open descriptor afterwards. Generation thread only.

    Raises Damaged, Replaced, OSError, and what mlx raises when memory is short.
    """
    status = os.stat(entry.path, follow_symlinks=False)
    try:
        with open_entry(entry.path) as reader:
            status, meta = reader.status, reader.header.meta
            if (meta.fingerprint, meta.namespace) != (entry.fingerprint, entry.namespace) or reader.key() != entry.key:
                raise Replaced
            verify = checking.wanted()
            arrays = reader.arrays(verify)
            checking.measured(entry.nbytes, reader.read_seconds, reader.hash_seconds if verify else None)
            caches = _load(meta, arrays)
            with suppress(OSError):  # a read-only directory: recency is not worth a restored entry
                used(reader.fd)
            return caches
    except ForeignEntry as error:
        raise Replaced from error
    except BadEntry as error:
        raise Damaged(str(error), status) from error


def _load(meta: Meta, arrays: dict[str, Any]) -> list[Any]:
    """Caches from checked parts. Raises BadEntry when they do not fit together, whatever the caches made of them."""
    try:
        caches = kinds.load(meta.descriptors, arrays)
        length = kinds.length(caches)
    except Exception as error:
        raise BadEntry(f"The caches cannot be put together ({error}).") from error
    if length is not None and length != meta.length:
        raise BadEntry(f"The caches hold {length} tokens, the header says {meta.length}.")
    return caches
