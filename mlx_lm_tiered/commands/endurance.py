"""``mlx_lm.tiered bench kills`` and ``bench soak``: what holds over hundreds of kills and thousands of requests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .terminal import count, model


def add_parsers(benches: Any) -> None:
    """The two, each with its flags."""
    kills = benches.add_parser("kills", help="what a busy server's directory holds after SIGKILLs at random moments")
    count(kills, "--count", 200, "kills")
    kills.set_defaults(run=run_kills)
    soak = benches.add_parser("soak", help="whether memory, files, descriptors and threads stay flat over thousands of requests")
    count(soak, "--requests", 5000, "requests, of several clients")
    soak.set_defaults(run=run_soak)
    for parser in (kills, soak):
        parser.add_argument("--model", metavar="DIR", help="directory or hub name of a model (default: a small one of random weights)")
        parser.add_argument("--seed", type=int, default=0, help="another one gives other conversations (default: 0)")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def run_kills(args: argparse.Namespace) -> int:
    from ..bench import kills
    from .bench import run_measurement

    return run_measurement(args, lambda: kills.run(_model(args), args.count, args.seed), lambda result: result["faults"][:5])


def run_soak(args: argparse.Namespace) -> int:
    from ..bench import soak
    from .bench import run_measurement

    return run_measurement(args, lambda: soak.run(_model(args), args.requests, args.seed), lambda result: result["faults"][:5])


def _model(args: argparse.Namespace) -> Path | None:
    named = model(args.model)
    return None if named is None else Path(named)
