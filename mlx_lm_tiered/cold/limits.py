"""How much of a disk the SSD tier may take."""

from __future__ import annotations

import os
from pathlib import Path


def affordable(root: Path, wanted: int) -> tuple[int, int]:
    """(bytes the tier may take, bytes free on its disk): `wanted`, but never above half of what is free.

    What the directory holds already counts as free: it is the tier's to replace. A
    directory that does not exist yet is judged by where it will be; when nothing can
    be told, `wanted` stands and writing will find out.
    """
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        status = os.statvfs(place)
    except OSError:
        return wanted, 0
    free = status.f_bavail * status.f_frsize
    return min(wanted, (free + _held(root)) // 2), free


def _held(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except OSError:
                continue  # gone meanwhile, or not ours to look at
    return total
