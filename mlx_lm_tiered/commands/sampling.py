"""``mlx_lm.tiered bench sampling``: whether drafts leave the distribution of sampled tokens alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .terminal import count

# A rule of --spec-sampling, and whether drafts are drawn at random.
CASES = (("rejection", True), ("rejection", False), ("target", False))


def add_parser(benches: Any) -> None:
    """It, with its flags."""
    parser = benches.add_parser("sampling", help="chi-square of pairs of sampled tokens under speculation, against the model's exact distribution")
    count(parser, "--samples", 200_000, "pairs in each case")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import sampling
    from .bench import run_rows

    return run_rows(
        args,
        lambda: {"samples": args.samples, "rows": [sampling.run(args.samples, rule, drawn, seed=args.seed) for rule, drawn in CASES]},
        lambda result: [] if all(row["fits"] for row in result["rows"]) else ["the distribution is not the model's"],
    )
