"""The files of a cache directory by their names, which say what they are and who continues whom."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME_DIGITS = 32


@dataclass(frozen=True)
class DiskFile:
    """A file under the directory. `kind` is ``entry``, ``partial``, ``bad``, ``writer``, ``memo`` (one being written) or ``other``; `owner` the fingerprint or token in its name; `charge` the bytes it counts for."""

    path: Path
    kind: str
    owner: str
    size: int
    charge: int
    used: int

    @property
    def name(self) -> str:
        """An entry's NAME."""
        return self.path.name[:NAME_DIGITS]

    @property
    def parent(self) -> str:
        """The NAME of the entry that this one continues; empty for a whole one."""
        return parent_name(self.path) if self.kind == "entry" else ""


def parent_name(path: Path) -> str:
    """The NAME of the entry that an entry's file continues; empty for a whole one."""
    return path.stem[NAME_DIGITS + 1 :]


def entry_name(namespace: str, key: bytes, parent: str = "") -> str:
    """The file name of an entry. The same tokens with the same parent get the same file, so a rename replaces them."""
    name = hashlib.blake2b(key, digest_size=16, person=hashlib.sha256(namespace.encode()).digest()[:16]).hexdigest()
    return f"{name}-{parent}.safetensors" if parent else f"{name}.safetensors"


def leaves_first(
    files: list[DiskFile], rank: Callable[[DiskFile], Any], pinned: frozenset[Path] = frozenset(), adrift: set[Path] | None = None
) -> Iterator[DiskFile]:
    """The files without `pinned` in the order of `rank`, but none before those that continue it. Judged by names alone.

    `adrift` is `rootless(files)`, from a caller who has it.
    """
    names = _by_name(files)
    adrift = rootless(files) if adrift is None else adrift
    children = Counter((file.path.parent, file.parent) for file in files if file.parent and file.path not in adrift)
    numbers = itertools.count()  # files that rank the same cannot be compared
    left = dict.fromkeys(file for file in files if file.path not in pinned)
    free = [(rank(file), next(numbers), file) for file in left if file.path in adrift or not children[file.path.parent, file.name]]
    heapq.heapify(free)
    while free:
        _, _, file = heapq.heappop(free)
        del left[file]
        yield file
        place = file.path.parent, file.parent
        if file.parent and file.path not in adrift:
            children[place] -= 1
            if not children[place]:
                for parent in names.get(place, ()):
                    if parent in left and parent.path not in adrift:
                        heapq.heappush(free, (rank(parent), next(numbers), parent))
    yield from sorted(left, key=rank)  # several files of one name can still stand in a circle


def rootless(files: list[DiskFile]) -> set[Path]:
    """The files that no whole entry leads to: what they continue is missing, or themselves. Judged by names alone."""
    children: dict[tuple[Path, str], list[DiskFile]] = {}
    for file in files:
        children.setdefault((file.path.parent, file.parent), []).append(file)
    adrift = {file.path for file in files if file.parent}
    level = [file for file in files if not file.parent]
    while level:
        level = [child for file in level for child in children.get((file.path.parent, file.name), ()) if child.path in adrift]
        adrift.difference_update(child.path for child in level)
    return adrift


def _by_name(files: list[DiskFile]) -> dict[tuple[Path, str], list[DiskFile]]:
    names: dict[tuple[Path, str], list[DiskFile]] = {}
    for file in files:
        names.setdefault((file.path.parent, file.name), []).append(file)
    return names
