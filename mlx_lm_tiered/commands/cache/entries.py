"""What is in the directory, as the commands see it: entries, their chains, their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...cold.catalog import MAX_CHAIN
from ...cold.checking import BadEntry
from ...cold.family import NAME_DIGITS
from ...cold.files import open_file
from ...cold.listing import Listed
from ..terminal import usage

SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def model_of(entry: Listed) -> str:
    """The model's name; the beginning of its fingerprint when the entry does not say."""
    name = entry.meta.provenance.get("model") if entry.meta else None
    return name if isinstance(name, str) and name else entry.fingerprint[:12]


def is_of(entry: Listed, wanted: str | None) -> bool:
    """Whether an entry is of the model that `--model` names."""
    return wanted is None or model_of(entry) == wanted or (len(wanted) >= 4 and entry.fingerprint.startswith(wanted))


def chosen(entries: Iterable[Listed], text: str) -> Listed:
    """The one entry whose file name, or FINGERPRINT/NAME, begins like this. Raises UsageError."""
    found = [e for e in entries if text and (e.path.name.startswith(text) or relative(e.path).startswith(text))]
    if not found:
        usage(f"there is no entry whose file name begins with {text!r}")
    if len(found) > 1:
        names = ", ".join(f"{e.fingerprint[:8]}/{e.path.name[:12]}" for e in found[:4])
        usage(f"{text!r} is the beginning of {len(found)} entries ({names}{', …' if len(found) > 4 else ''}); write more of it")
    return found[0]


Known = dict[tuple[Path, str, str], Listed]  # entries by what those that continue them call them


def known(entries: Iterable[Listed]) -> Known:
    """The readable entries by folder, NAME and checksum."""
    return {(e.path.parent, e.path.name[:NAME_DIGITS], e.checksum): e for e in entries if e.meta is not None}


def chain_of(entry: Listed, known: Known) -> list[Listed]:
    """The entries that are read for this one, the whole one first. What is missing is left out."""
    chain = [entry]
    while (meta := chain[-1].meta) is not None and meta.start:
        parent = known.get((entry.path.parent, meta.parent, meta.parent_checksum))
        if parent is None or len(chain) > MAX_CHAIN:
            break
        chain.append(parent)
    return chain[::-1]


def key_of(chain: Iterable[Listed]) -> bytes:
    """All tokens of a chain, as an index key, checked by their checksums. Raises BadEntry or OSError."""
    key = b""
    for link in chain:
        with open_file(link.path) as reader:
            start = reader.header.meta.start * 8
            if reader.header.checksum != link.checksum or len(key) < start:
                raise BadEntry("What it continues is missing or was replaced.")
            key = key[:start] + reader.key()
    return key


def parse_age(text: str) -> float:
    """Seconds from ``30d``, ``12h``, ``45min``, ``90s`` or ``2w``. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if not match or match[2] not in SECONDS:
        usage(f"{text!r} is not an age; write it like 30d, 12h, 45min or 90s")
    return float(match[1]) * SECONDS[match[2]]


def age(seconds: float) -> str:
    """An age as people say it."""
    for unit in ("d", "h", "min"):
        if seconds >= SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def moment(nanoseconds: int) -> str:
    """A time stamp for programs, in UTC."""
    try:
        return datetime.fromtimestamp(nanoseconds // 10**9, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return ""  # a file may claim any time


def counted(number: int, what: str = "entry") -> str:
    """``1 entry``, ``2 entries``."""
    plural = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{number:,} {what if number == 1 else plural}"


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def printable(text: str) -> str:
    """Text of a file without what a terminal would act upon."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def relative(path: Path) -> str:
    """FINGERPRINT/FILE of an entry's path."""
    return f"{path.parent.name}/{path.name}"
