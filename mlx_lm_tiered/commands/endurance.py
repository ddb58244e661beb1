"""``mlx_lm.tiered bench kills``, ``bench soak``, ``bench ranks``, ``bench exhaustion`` and ``bench stops``: what holds over hundreds of kills, thousands of requests and of places to stop at."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .terminal import count, model


def add_parsers(benches: Any) -> None:
    """The five, each with its flags."""
    kills = benches.add_parser("kills", help="what a busy server's directory holds after SIGKILLs at random moments")
    count(kills, "--count", 200, "kills")
    kills.set_defaults(run=run_kills)
    soak = benches.add_parser("soak", help="whether memory, files, descriptors and threads stay flat over thousands of requests")
    count(soak, "--requests", 5000, "requests, of several clients")
    soak.set_defaults(run=run_soak)
    stops = benches.add_parser("stops", help="whether speculation that is stopped everywhere leaves tokens, caches and the next turn as plain decoding does")
    count(stops, "--tokens", 2000, "tokens of the answer")
    count(stops, "--every", 10, "tokens between two places to stop at")
    count(stops, "--draft-tokens", 4, "tokens drafted at a time, by n-grams")
    stops.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N shares of the places, as the whole takes minutes (default: 1/1)")
    stops.add_argument("--scheme", default="bf16", metavar="SCHEME", help="--kv-scheme of the caches (default: bf16)")
    stops.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model; float32, or rounding decides")
    stops.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    stops.set_defaults(run=run_stops)
    exhaustion = benches.add_parser("exhaustion", help="whether every request ends as it must, and the pool empty, with many more requests than a pool of paged KV has room for")
    count(exhaustion, "--requests", 200, "requests, of several clients")
    count(exhaustion, "--room", 20, "requests that the pool has room for")
    exhaustion.set_defaults(run=run_exhaustion)
    ranks = benches.add_parser("ranks", help="what two ranks of a server say and leave when they are restarted and killed, beside two of mlx-lm alone")
    count(ranks, "--rounds", 10, "starts")
    ranks.add_argument("--sharding", choices=("tensor", "pipeline"), default="tensor", help="how the model is divided (default: tensor)")
    count(ranks, "--prefix-characters", 4000, "length of the prompt whose restore is measured")
    ranks.set_defaults(run=run_ranks)
    for parser in (kills, soak, exhaustion, ranks):
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


def run_exhaustion(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import exhaustion
    from .bench import run_measurement

    return run_measurement(args, lambda: exhaustion.run(_model(args), args.requests, args.room, args.seed), lambda result: result["faults"][:5])


def run_ranks(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import ranks
    from .bench import run_measurement

    return run_measurement(args, lambda: ranks.run(_model(args), args.rounds, args.seed, args.sharding, args.prefix_characters), lambda result: result["faults"][:5])


def run_stops(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import stops
    from .bench import run_rows

    path = Path(model(args.model))
    return run_rows(args, lambda: stops.run(path, args.tokens, args.every, args.draft_tokens, args.scheme, part=args.part), stops.found)


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    try:
        part = int(number), int(of)
    except ValueError:
        part = 0, 0
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2/5")
    return part


def _model(args: argparse.Namespace) -> Path | None:
    named = model(args.model)
    return None if named is None else Path(named)
