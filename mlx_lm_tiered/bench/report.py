"""What every benchmark reports besides its numbers, and how."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlx_lm_tiered import versions


def environment() -> dict[str, Any]:
    """Date, command, versions, machine, mlx's device."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlx_lm.tiered", *sys.argv[1:]]),
        "versions": versions.versions(),
        "machine": versions.machine(),
        "device": versions.device(),
    }


def spread(name: str, ratios: Sequence[float]) -> dict[str, float]:
    """The ratios of a measurement's pairs: their median as `name`, and between which they lie."""
    return {name: median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}


def write(result: dict[str, Any], file: Path | None) -> None:
    """The result with its environment as JSON into `file`, if there is one."""
    if file is not None:
        file.write_text(json.dumps({**result, **environment()}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def lines(result: dict[str, Any]) -> str:
    """The scalar values of a result, one a line."""
    shown = {k: v for k, v in result.items() if not isinstance(v, (list, dict))}
    width = max(map(len, shown))
    return "\n".join(f"{k.ljust(width)}  {_text(v)}" for k, v in shown.items())


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with a column for each key that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
