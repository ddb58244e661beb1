"""Looking at a cache directory from outside a server: what is in it, is it sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .checking import BadEntry, ForeignEntry
from .directory import Directory
from .files import open_file
from .meta import Header, Meta


@dataclass(frozen=True)
class Listed:
    """One entry file. `used` is its last use in nanoseconds since 1970; `problem` is a sentence when it cannot be used; `meta` is None when it cannot be read.

    `checksum` is its header's own, by which those that continue it name it. `state` is
    ``sound``, ``orphan`` (what it continues is missing), ``foreign`` (of another format
    version) or ``damaged``.
    """

    path: Path
    fingerprint: str
    nbytes: int
    used: int
    meta: Meta | None
    problem: str = ""
    checksum: str = ""
    state: str = "sound"


def listing(directory: Directory) -> Iterator[Listed]:
    """Every entry file of the directory, last used first. Reads headers; raises OSError only for the directory itself."""
    files = [file for file in directory.files() if file.kind == "entry"]
    headers: dict[Path, Header] = {}
    problems: dict[Path, tuple[str, str]] = {}
    for file in files:
        try:
            with open_file(file.path) as reader:
                headers[file.path] = reader.header
        except FileNotFoundError:
            continue
        except ForeignEntry as error:
            problems[file.path] = str(error), "foreign"
        except (BadEntry, OSError) as error:
            problems[file.path] = str(error), "damaged"
    sound = _with_parents(headers)
    for file in sorted(files, key=lambda f: f.used, reverse=True):
        header = headers.get(file.path)
        if header is not None:
            problem, state = ("", "sound") if file.path in sound else ("The entry that it continues is missing.", "orphan")
            yield Listed(file.path, file.owner, file.size, file.used, header.meta, problem, header.checksum, state)
        elif file.path in problems:
            problem, state = problems[file.path]
            yield Listed(file.path, file.owner, file.size, file.used, None, problem, state=state)


def _with_parents(headers: dict[Path, Header]) -> set[Path]:
    """The files whose chains are here down to a whole entry."""
    children: dict[tuple[Path, str], list[Path]] = {}
    for path, header in headers.items():
        children.setdefault((path.parent, header.meta.parent_checksum), []).append(path)
    found: set[Path] = set()
    level = [path for path, header in headers.items() if header.meta.start == 0]
    while level:
        found.update(level)
        level = [child for path in level for child in children.get((path.parent, headers[path].checksum), ()) if child not in found]
    return found


def entries(root: Path) -> Iterator[Listed]:
    """The same for a directory by its path, without becoming one of its writers."""
    return listing(Directory(Path(root).expanduser().absolute(), 0))


def check(path: Path) -> str:
    """What is wrong with an entry file, tensors included; empty when nothing is."""
    try:
        with open_file(path) as reader:
            reader.check()
    except (BadEntry, OSError) as error:
        return str(error)
    return ""
