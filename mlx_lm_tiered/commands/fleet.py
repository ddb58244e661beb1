"""``mlx_lm.tiered bench fleet``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .terminal import count, end_in_order, say, writable

# Figures that are better read in millions, or in terabytes.
_MILLIONS = ("get", "head", "put", "list", "delete")
_TERABYTES = ("read_bytes", "written_bytes", "stored_bytes")


def add_parser(benches: Any) -> None:
    parser = benches.add_parser("fleet", help="simulates a month of many machines behind one shared store: requests, bytes, hit rates, dollars")
    count(parser, "--machines", 1000, "machines, 20 to a team")
    parser.add_argument("--scheme", default="affine:4", metavar="SCHEME", help="KV scheme of an 8B model, or bf16 (default: affine:4)")
    parser.add_argument("--writers", type=float, default=1.0, metavar="SHARE", help="share of the machines that upload; the others only read (default: 1)")
    count(parser, "--teams", 2, "teams that are simulated, of all of which they stand for")
    count(parser, "--seed", 1, "of the random numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..bench import fleet, report

    writable(args.json)
    end_in_order()
    if not 0 <= args.writers <= 1:
        return say(f"--writers {args.writers:g}: a share is between 0 and 1", 2)
    try:
        fleet.token_bytes(args.scheme)
    except ValueError as error:
        return say(f"--scheme {args.scheme}: {error}", 2)
    result = fleet.run(args.machines, args.scheme, args.writers, args.teams, args.seed)
    report.write(result, args.json)
    print(report.lines(result))
    print(report.table(list(_shown(result["rows"]))))
    return 0


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a figure, a column a trace, and one for what formulas say where there are some."""
    names = [name for name in rows[0] if name not in ("trace", "paper", "dollars")]
    shown = []
    for name in names:
        factor = 1e-6 if name in _MILLIONS else 1e-12 if name in _TERABYTES else 1.0
        label = f"{name} (millions)" if name in _MILLIONS else name.replace("_bytes", " (TB)")
        line: dict[str, Any] = {"figure": label}
        for row in rows:
            line[row["trace"]] = row[name] * factor
            if row["paper"] is not None:
                line[f"{row['trace']}, on paper"] = row["paper"][name] * factor if name in row["paper"] else None
        shown.append(line)
    for price in rows[0]["dollars"]:
        shown.append({"figure": f"$ a month, {price}", **{row["trace"]: row["dollars"][price] for row in rows}})
    return shown
