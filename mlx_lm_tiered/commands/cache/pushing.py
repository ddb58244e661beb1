"""``cache push``: entries and what they continue, to a shared store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...cold import listing
from ...cold.catalog import ColdEntry
from ...cold.checking import BadEntry
from ...cold.directory import Directory
from ...cold.scan import catalog_of
from ...settings import format_size
from ...shared.lookup import Lookup
from ...shared.names import Names
from ...shared.pushing import LEAST_TOKENS, Pushing
from ..terminal import bytes_bar, say, usage
from .entries import chosen, columns, counted, is_of, relative
from .sharing import store


def run(args: argparse.Namespace, root: Path) -> int:
    """Upload; 1 when an entry went or turned out damaged meanwhile."""
    if bool(args.entry) == args.all:
        usage("which entry? give the beginning of its file name, or --all")
    if args.model and not args.all:
        usage("--model goes with --all")
    plan = _plan(args, root)
    done: list[tuple[ColdEntry, int]] = []
    there, failed = 0, []
    total, at = sum(entry.nbytes for entry in plan), 0
    with store(args) as shared, bytes_bar("uploading") as bar:
        pushing = Pushing(shared.objects, Lookup(shared.objects, shared.executor))
        for entry in plan:
            bar(at, total)
            at += entry.nbytes
            try:
                pushed = pushing.push(Names(shared.team, entry.fingerprint), entry, dry_run=args.dry_run)
            except FileNotFoundError:
                failed.append((entry, "it went meanwhile"))
            except BadEntry as error:
                failed.append((entry, str(error)))
            else:
                if pushed.outcome == "there":
                    there += 1
                else:
                    done.append((entry, pushed.nbytes))
    size = sum(nbytes for _, nbytes in done)
    if args.json:
        files = [relative(entry.path) for entry, _ in done]
        left_out = [{"file": relative(entry.path), "why": why} for entry, why in failed]
        print(json.dumps({"entries": len(done), "bytes": size, "already_there": there, "dry_run": args.dry_run, "files": files, "left_out": left_out}, indent=2))
    else:
        if args.dry_run and done:
            print(columns([(format_size(nbytes), relative(entry.path)) for entry, nbytes in done]))
        print(f"{counted(len(done))}, {format_size(size)}: {'would be uploaded' if args.dry_run else 'uploaded'}; {there} there already")
        for entry, why in failed:
            say(f"{relative(entry.path)} is left out: {why}", 1)
    return 1 if failed else 0


def _plan(args: argparse.Namespace, root: Path) -> list[ColdEntry]:
    """What is to be uploaded, as the index knows it."""
    listed = list(listing.entries(root))
    wanted = [chosen(listed, args.entry)] if args.entry else [entry for entry in listed if is_of(entry, args.model)]
    catalog = catalog_of(Directory(root, 0).files(), {entry.fingerprint for entry in wanted})
    if not args.entry:
        paths = {entry.path for entry in wanted}
        return [entry for entry in catalog.tips(LEAST_TOKENS) if entry.path in paths]
    entry = catalog.at(wanted[0].path)
    if entry is None:
        usage(f"{relative(wanted[0].path)} cannot be used: {wanted[0].problem or 'what it continues is missing'}")
    if entry.namespace or entry.length < LEAST_TOKENS:
        usage(f"{relative(entry.path)} is not shared: only prefixes of {LEAST_TOKENS} tokens or more are, without companion state")
    return [entry]
