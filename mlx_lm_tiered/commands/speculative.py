"""``mlx_lm.tiered bench speculative``: what drafts are worth."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..speculation.choose import MOST
from .terminal import count, model, say


def add_parser(benches: Any) -> None:
    """It, with its flags."""
    parser = benches.add_parser("speculative", help="speculative decoding against plain decoding: copying, editing and free text")
    parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    parser.add_argument("--source", choices=("ngram",), default="ngram", help="where drafts come from (default: ngram)")
    parser.add_argument("--gammas", default="4,8", metavar="LIST", help="tokens drafted at a time, by commas (default: 4,8)")
    count(parser, "--prefix-tokens", 300, "tokens of each prompt, about")
    count(parser, "--decode-tokens", 64, "tokens decoded in each measurement")
    count(parser, "--repeats", 3, "pairs of measurements", "R")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import speculative
    from .bench import run_rows

    try:
        gammas = [int(text) for text in args.gammas.split(",")]
    except ValueError:
        return say(f"--gammas {args.gammas} is not a list of whole numbers", 2)
    if not all(1 <= gamma <= MOST for gamma in gammas):
        return say(f"--gammas {args.gammas}: each must be between 1 and {MOST}", 2)
    path = Path(model(args.model))
    return run_rows(
        args,
        lambda: speculative.run(path, args.source, gammas, args.prefix_tokens, args.decode_tokens, args.repeats),
        lambda result: [] if all(row["tokens_equal"] for row in result["rows"]) else ["tokens differ from plain decoding's"],
    )
