"""What can never be used again and was not used for long: it goes, also when there is room.

The cap alone would let it lie there for good in a directory that never fills up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .checking import BadEntry
from .directory import Directory
from .family import DiskFile, leaves_first, rootless
from .files import open_file

UNUSED = 30 * 24 * 3600.0  # seconds


def age_out(directory: Directory, serving: frozenset[str] = frozenset(), unused: float = UNUSED) -> list[DiskFile]:
    """Delete it; returns the files. Raises OSError.

    That is, once it was not used for `unused` seconds: damaged files; entries that lack
    what they continue; and all entries of a fingerprint, not one of which was used
    since, that other versions of mlx or mlx-lm made than are installed here, or another
    format. A model that changed or went may come back; `cache prune --stale` judges that.
    `serving` are fingerprints to be spared.
    """
    before = time.time_ns() - int(unused * 1e9)
    with directory.locked():
        files = [file for file in directory.files() if file.kind in ("entry", "bad")]
        entries: dict[str, list[DiskFile]] = {}
        for file in files:
            if file.kind == "entry":
                entries.setdefault(file.owner, []).append(file)
        adrift = rootless(files)
        doomed = [file for file in files if file.used < before and (file.kind == "bad" or file.path in adrift)]
        for fingerprint, ours in entries.items():
            if fingerprint not in serving and max(file.used for file in ours) < before and _foreign(file.path for file in ours):
                doomed.extend(file for file in ours if file.path not in adrift)
        gone = list(leaves_first(doomed, lambda file: file.used))
        for file in gone:
            file.path.unlink(missing_ok=True)
        for folder in {file.path.parent for file in gone if file.kind == "entry"}:
            with suppress(OSError):  # not empty
                folder.rmdir()
    return gone


def _foreign(paths: Iterable[Path]) -> bool:
    """Whether no server with what is installed here can read these entries of one fingerprint."""
    for path in paths:
        try:
            with open_file(path) as reader:
                return _made_elsewhere(reader.header.meta.provenance)
        except BadEntry:
            continue  # another format, or damaged
        except OSError:
            return False  # cannot be told now
    return True


def _made_elsewhere(provenance: Mapping[str, Any]) -> bool:
    installed = {"mlx": mx.__version__, "mlx_lm": version("mlx-lm")}  # type: ignore[attr-defined]
    return any(isinstance(made := provenance.get(name), str) and made != here for name, here in installed.items())
