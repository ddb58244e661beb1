"""``mlx_lm.tiered bench speculative``: what drafts are worth."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..speculation.artifacts import ASSISTANTS, model_type, resolve
from ..speculation.choose import MOST
from .terminal import count, model, say


SOURCES = ("ngram", "draft", "assistant")


def add_parser(benches: Any) -> None:
    """It, with its flags."""
    parser = benches.add_parser("speculative", help="speculative decoding against plain decoding: copying, editing and free text")
    parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    parser.add_argument("--source", choices=SOURCES, default="ngram", help="where drafts come from: ngram, or --draft-model, which is a model or an assistant (default: ngram)")
    parser.add_argument("--draft-model", metavar="DIR", help="directory or hub name of the model that drafts, or of the assistant")
    parser.add_argument("--gammas", default="4,8", metavar="LIST", help="tokens drafted at a time, by commas (default: 4,8)")
    count(parser, "--prefix-tokens", 300, "tokens of each prompt, about")
    count(parser, "--decode-tokens", 64, "tokens decoded in each measurement")
    count(parser, "--repeats", 3, "pairs of measurements", "R")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def add_streams_parser(benches: Any) -> None:
    """``bench streams``, with its flags."""
    parser = benches.add_parser("streams", help="requests at once, and one by itself, of a server that drafts against one that does not")
    parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    parser.add_argument("--draft-model", metavar="DIR", help="directory or hub name of the model or assistant that drafts (default: --speculation ngram)")
    parser.add_argument("--num-draft-tokens", metavar="N", help="tokens drafted at a time, or auto")
    count(parser, "--streams", 8, "requests at once", "S")
    count(parser, "--prefix-tokens", 128, "length of each prompt")
    count(parser, "--decode-tokens", 96, "tokens of each answer")
    count(parser, "--repeats", 3, "pairs of measurements", "R")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run_streams)


def run_streams(args: argparse.Namespace) -> int:
    from ..bench import streams
    from .bench import differing, run_measurement

    flags = ["--speculation", "ngram"] if args.draft_model is None else ["--draft-model", args.draft_model]
    flags += [] if args.num_draft_tokens is None else ["--num-draft-tokens", args.num_draft_tokens]
    return run_measurement(
        args,
        lambda: streams.run(Path(model(args.model)), flags, args.streams, args.prefix_tokens, args.decode_tokens, args.repeats),
        differing,
    )


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
    try:
        draft = _draft_model(args.source, args.draft_model)
    except ValueError as error:
        return say(str(error), 2)
    return run_rows(
        args,
        lambda: speculative.run(path, args.source, gammas, args.prefix_tokens, args.decode_tokens, args.repeats, draft),
        lambda result: [] if all(row["tokens_equal"] for row in result["rows"]) else ["tokens differ from plain decoding's"],
    )


def _draft_model(source: str, name: str | None) -> Path | None:
    """The directory of the model that drafts, where the source has one. Raises ValueError with one sentence."""
    if source == "ngram":
        if name is not None:
            raise ValueError("--draft-model does nothing with --source ngram; leave one of them out")
        return None
    if name is None:
        raise ValueError(f"--source {source} needs --draft-model")
    path = resolve(name)
    if (model_type(path) in ASSISTANTS) != (source == "assistant"):
        raise ValueError(f"--draft-model {name} is {'no ' if source == 'assistant' else 'an '}assistant; choose another --source")
    return path
