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
    """A file under the directory. `kind` is ``entry``, ``partial``, ``bad``, ``writer`` or ``other``; `owner` the fingerprint or token in its name; `charge` the bytes it counts for."""

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


def leaves_first(files: list[DiskFile], rank: Callable[[DiskFile], Any]) -> Iterator[DiskFile]:
    """The files in the order of `rank`, but none before those that continue it. Judged by names alone; what continues itself in a circle comes last."""
    children = Counter((file.path.parent, file.parent) for file in files if file.parent)
    names: dict[tuple[Path, str], list[DiskFile]] = {}
    for file in files:
        names.setdefault((file.path.parent, file.name), []).append(file)
    numbers = itertools.count()  # files that rank the same cannot be compared
    free = [(rank(file), next(numbers), file) for file in files if not children[file.path.parent, file.name]]
    heapq.heapify(free)
    left = dict.fromkeys(files)
    while free:
        _, _, file = heapq.heappop(free)
        del left[file]
        yield file
        place = file.path.parent, file.parent
        if file.parent:
            children[place] -= 1
            if not children[place]:
                for parent in names.get(place, ()):
                    heapq.heappush(free, (rank(parent), next(numbers), parent))
    yield from sorted(left, key=rank)


def parentless(files: list[DiskFile]) -> set[Path]:
    """Those that continue a file that is not there."""
    names = {(file.path.parent, file.name) for file in files}
    return {file.path for file in files if file.parent and (file.path.parent, file.parent) not in names}
