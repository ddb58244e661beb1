"""Digests of a model's files, under a bar: those that are not remembered are read, and weights take a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...digests import DigestMemo, file_digest
from ..terminal import bytes_bar


@contextmanager
def hashing(files: Mapping[str, Path], memo: DigestMemo) -> Iterator[Callable[[Path], str]]:
    """What gives the digest of each of a source's files. It, and the beginning, raise OSError for one that cannot be read."""
    total, done = sum(path.stat().st_size for path in files.values()), 0
    with bytes_bar("reading the model's files") as bar:

        def digest(path: Path) -> str:
            nonlocal done
            bar(done, total)
            done += path.stat().st_size
            return file_digest(path, memo)

        yield digest
