"""``mlx_lm.tiered bench shared``: a second machine's first reply."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .terminal import count, model, usage


def add_parser(benches: Any) -> None:
    """Its flags."""
    shared = benches.add_parser("shared", help="time to first token on a machine that fetches what another has computed, over that of the other")
    count(shared, "--prefix-tokens", 4000, "length of the prompt")
    count(shared, "--repeats", 3, "pairs of measurements", "R")
    shared.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    shared.add_argument("--shared-cache", metavar="URL", help="a store (default: nginx with WebDAV on this machine, where it is installed, else a directory)")
    shared.add_argument("--faults", type=_share, default=0.0, metavar="SHARE", help="share of the store's replies that are dropped, cut off or corrupted; with nginx")
    shared.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    shared.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    shared.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..bench import shared, stores
    from ..store_url import parse_store
    from .bench import differing, run_measurement

    if args.faults and (args.shared_cache is not None or stores.NGINX is None):
        usage("--faults needs nginx, and no other store")
    if args.shared_cache is not None:
        try:
            args.shared_cache = parse_store(args.shared_cache)
        except ValueError as error:
            usage(f"--shared-cache: {error}")
    return run_measurement(
        args,
        lambda: shared.run(Path(model(args.model)), args.prefix_tokens, args.repeats, url=args.shared_cache, faults=args.faults, seed=args.seed),
        differing,
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value
