"""``cache expire``: the end of what is old in a shared store, as servers see to it once a day."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ...settings import format_size
from ...shared.cleaning import Cleaning
from .entries import counted
from .options import setting
from .sharing import store


def run(args: argparse.Namespace, root: None) -> int:
    """Delete."""
    limit, ttl = setting(args, "shared_cache_max"), setting(args, "shared_cache_ttl")
    with store(args) as shared:
        cleaning = Cleaning(shared.objects, shared.team, shared.executor, limit, ttl)
        done = cleaning.clean(args.dry_run, None if args.dry_run else cleaning.begun())
    if args.json:
        print(json.dumps({**asdict(done), "dry_run": args.dry_run}, indent=2))
    else:
        verb = "would be deleted" if args.dry_run else "deleted"
        print(f"{counted(done.gone)} of {done.entries:,}, {format_size(done.gone_bytes)} of {format_size(done.nbytes)}: {verb}")
    return 0
