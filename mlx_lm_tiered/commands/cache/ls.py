"""``cache ls``: every entry, one a line, and what they take together."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...cold import listing
from ...settings import env_name, format_size, parse_size
from ..terminal import usage
from . import COLUMNS
from .entries import age, columns, counted, is_of, model_of, moment, printable


@dataclass(frozen=True)
class Row:
    """One entry. `new_tokens` are those that its own file holds; `age_s` is seconds since its last use.

    `fault` says why it cannot be used, empty when it can; `companion` what kind of companion state it has.
    """

    file: str
    model: str
    tokens: int
    new_tokens: int
    bytes: int
    age_s: float
    used: str
    created: str
    role: str
    parent: str
    fingerprint: str
    fault: str = ""
    state: str = "sound"
    companion: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def row_of(found: listing.Listed, fault: str = "", state: str = "") -> Row:
    """An entry as a row."""
    meta = found.meta
    return Row(
        file=found.path.name,
        model=printable(model_of(found)),
        tokens=meta.length if meta else 0,
        new_tokens=meta.length - meta.start if meta else 0,
        bytes=found.nbytes,
        age_s=max(0.0, time.time() - found.used / 1e9),
        used=moment(found.used),
        created=moment(meta.created) if meta else "",
        role=printable(meta.role) if meta else "",
        parent=meta.parent if meta else "",
        fingerprint=found.fingerprint,
        fault=found.problem or fault,
        state=state or found.state,
        companion=meta.companion.kind if meta and meta.companion else "",
    )


# What stands in a column, and the key by which rows are sorted.
CELLS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "used": ("last used", lambda row: age(row.age_s)),
    "created": ("created", lambda row: row.created[:16].replace("T", " ")),
    "tokens": ("tokens", lambda row: f"{row.tokens:,}"),
    "new": ("new", lambda row: f"{row.new_tokens:,}"),
    "size": ("size", lambda row: format_size(row.bytes)),
    "role": ("role", lambda row: row.companion.partition("/")[0] or row.role),
    "model": ("model", lambda row: row.model),
    "fingerprint": ("fingerprint", lambda row: row.fingerprint[:12]),
    "parent": ("continues", lambda row: row.parent[:12]),
    "entry": ("entry", lambda row: row.file[:12]),
}
assert tuple(CELLS) == COLUMNS
KEYS: dict[str, Callable[[Row], float]] = {"used": lambda row: -row.age_s, "size": lambda row: row.bytes, "tokens": lambda row: row.tokens}


def run(args: argparse.Namespace, root: Path) -> int:
    """List the entries; 1 when one cannot be used."""
    names = [name.strip() for name in args.columns.split(",")]
    if unknown := [name for name in names if name not in CELLS]:
        usage(f"there is no column {unknown[0]!r}; there are {', '.join(CELLS)}")
    rows = [row_of(found) for found in listing.entries(root) if is_of(found, args.model)]
    rows.sort(key=KEYS[args.sort], reverse=not args.reverse)
    print(json.dumps([row.as_json() for row in rows], indent=2) if args.json else f"{table(rows, names)}\n{totals(rows)}")
    return 1 if any(row.fault for row in rows) else 0


def table(rows: list[Row], names: list[str]) -> str:
    """The list for people."""
    lines = [tuple(CELLS[name][0] for name in names)]
    for row in rows:
        cells = [CELLS[name][1](row) for name in names]
        lines.append((*cells[:-1], cells[-1] + (f"  {printable(row.fault)}" if row.fault else "")))
    return columns(lines)


def totals(rows: list[Row]) -> str:
    """What they take, of the cap where it is known, and by model."""
    damaged = sum(bool(row.fault) for row in rows)
    text = f"{counted(len(rows))}, {format_size(sum(row.bytes for row in rows))}{_of_cap()}, {damaged} damaged"
    models: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        models[row.model, row.fingerprint].append(row)
    if len(models) > 1:
        for (name, fingerprint), those in sorted(models.items()):
            text += f"\n  {name} ({fingerprint[:12]}): {counted(len(those))}, {format_size(sum(row.bytes for row in those))}"
    return text


def _of_cap() -> str:
    """The cap that the environment sets: a directory does not know that of its servers."""
    try:
        return f" of {format_size(parse_size(os.environ[env_name('ssd_cache_max')]))}"
    except (KeyError, ValueError):
        return ""
