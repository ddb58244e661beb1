"""Looking at a cache directory from outside a server: what is in it, is it sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .directory import Directory
from .format import BadEntry, Meta
from .reader import open_entry


@dataclass(frozen=True)
class Listed:
    """One entry file. `used` is its last use in nanoseconds since 1970; `meta` is None and `problem` a sentence when it cannot be read."""

    path: Path
    fingerprint: str
    nbytes: int
    used: int
    meta: Meta | None
    problem: str = ""


def listing(directory: Directory) -> Iterator[Listed]:
    """Every entry file of the directory, last used first. Reads headers; raises OSError only for the directory itself."""
    files = [file for file in directory.files() if file.kind == "entry"]
    for file in sorted(files, key=lambda f: f.used, reverse=True):
        meta, problem = None, ""
        try:
            with open_entry(file.path) as reader:
                meta = reader.header.meta
        except FileNotFoundError:
            continue
        except (BadEntry, OSError) as error:
            problem = str(error)
        yield Listed(file.path, file.owner, file.size, file.used, meta, problem)


def entries(root: Path) -> Iterator[Listed]:
    """The same for a directory by its path, without becoming one of its writers."""
    return listing(Directory(Path(root).expanduser().absolute(), 0))


def check(path: Path) -> str:
    """What is wrong with an entry file, tensors included; empty when nothing is."""
    try:
        with open_entry(path) as reader:
            reader.check()
    except (BadEntry, OSError) as error:
        return str(error)
    return ""
