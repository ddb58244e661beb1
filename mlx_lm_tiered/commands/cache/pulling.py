"""``cache pull``: entries of a shared store, into the directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...cold.checking import BadEntry
from ...cold.directory import DirectoryFull
from ...cold.limits import affordable
from ...cold.store import ColdStore
from ...index.keys import WIDTH
from ...settings import format_size
from ...shared.fetching import Fetching, Gone, Progress
from ...shared.lookup import read_manifest
from ...shared.manifest import Manifest
from ...shared.names import ENTRIES, Names
from ...shared.objects import Damaged, persistent
from ..terminal import bytes_bar, say, usage
from .entries import columns, counted
from .options import setting
from .sharing import Store, store


def run(args: argparse.Namespace, root: Path) -> int:
    """Fetch; 1 when something was refused or is gone."""
    if bool(args.entry) == args.all:
        usage("which entry? give the beginning of its name in the store (`pull --all --dry-run` lists them), or --all")
    with store(args) as shared:
        refused: list[tuple[str, str]] = []
        plan = _plan(shared, args, refused)
        cold = ColdStore(root, affordable(root, setting(args, "ssd_cache_max"))[0])
        try:
            done, there = _take(args, shared, cold, plan, refused)
        finally:
            cold.close()
    size = sum(nbytes for _, _, nbytes in done)
    if args.json:
        files = [{"entry": name, "fingerprint": manifest.fingerprint, "tokens": len(manifest.key) // WIDTH, "bytes": nbytes} for name, manifest, nbytes in done]
        told = [{"entry": name, "why": why} for name, why in refused]
        print(json.dumps({"entries": len(done), "bytes": size, "already_there": there, "dry_run": args.dry_run, "files": files, "refused": told}, indent=2))
    else:
        if args.dry_run and done:
            print(columns([(name, manifest.fingerprint[:12], f"{len(manifest.key) // WIDTH} tokens", format_size(nbytes)) for name, manifest, nbytes in done]))
        print(f"{counted(len(done))}, {format_size(size)}: {'would be fetched' if args.dry_run else 'fetched'}; {there} here already")
        for name, why in refused:
            say(f"{name} is refused: {why}", 1)
    return 1 if refused else 0


def _plan(shared: Store, args: argparse.Namespace, refused: list[tuple[str, str]]) -> list[tuple[str, Manifest]]:
    """The names and manifests that are wanted."""
    found = []
    for folder in (f"{shared.team.folder}/{name}" for name in shared.objects.folders(shared.team.folder)):
        for listed in shared.objects.files(f"{folder}/{ENTRIES}"):
            if args.entry and not listed.name.startswith(args.entry):
                continue
            try:
                manifest = persistent(lambda: read_manifest(shared.objects, shared.team, folder, listed.name))  # noqa: B023
            except Damaged as error:
                refused.append((listed.name, str(error)))
                continue
            if manifest is not None and manifest.fingerprint.startswith(args.model or ""):
                found.append((listed.name, manifest))
    if args.entry and len(found) + len(refused) != 1:
        usage(f"{len(found)} entries of the store have names that begin with {args.entry!r}" if found else f"no entry of the store has a name that begins with {args.entry!r}")
    return found


def _take(
    args: argparse.Namespace, shared: Store, cold: ColdStore, plan: list[tuple[str, Manifest]], refused: list[tuple[str, str]]
) -> tuple[list[tuple[str, Manifest, int]], int]:
    """What was fetched, with its bytes, and how many were here."""
    for fingerprint in {manifest.fingerprint for _, manifest in plan}:
        cold.attach(fingerprint)
    cold.wait_scanned()
    fetching = Fetching(shared.objects, cold.arriving, shared.executor)
    done, there = [], 0
    total, at = sum(manifest.nbytes for _, manifest in plan), 0
    with bytes_bar("fetching") as bar:
        for name, manifest in plan:
            bar(at, total)
            at += manifest.nbytes
            size = fetching.missing(manifest, len(manifest.links))
            if size == 0:
                there += 1
                continue
            try:
                if not args.dry_run:
                    fetching.fetch(Names(shared.team, manifest.fingerprint), manifest, len(manifest.links), Progress())
            except (BadEntry, Gone, DirectoryFull, Damaged, FileExistsError, FileNotFoundError) as error:
                refused.append((name, str(error)))
            else:
                done.append((name, manifest, size))
    return done, there
