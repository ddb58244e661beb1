"""``mlx_lm.tiered cache``: look into, check, prune and move the entries of a directory. No server is needed; one may be running.

A module per command, which is imported when the command runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ..terminal import directory, positive, say, usage

SORTS = ("used", "size", "tokens")
COLUMNS = ("used", "created", "tokens", "new", "size", "role", "model", "fingerprint", "parent", "entry")
ENTRY = "the beginning of an entry's file name"
DEFAULT_COLUMNS = "used,tokens,size,model,entry"


def add_parsers(cache: argparse.ArgumentParser) -> None:
    """The commands, each with its flags."""
    commands = cache.add_subparsers(metavar="ACTION", required=True)

    ls = _command(commands, "ls", "list the entries, the last used first", aliases=["list"])
    _model(ls, "only entries of this model: its name, or the beginning of its fingerprint")
    ls.add_argument("--sort", choices=SORTS, default="used", help="the greatest first (default: used, the last used first)")
    ls.add_argument("--reverse", action="store_true", help="the other way round")
    ls.add_argument("--columns", default=DEFAULT_COLUMNS, metavar="A,B,…", help=f"of {', '.join(COLUMNS)} (default: {DEFAULT_COLUMNS})")

    show = _command(commands, "show", "what one entry's headers say, and its chain of files", first=("entry", "ENTRY", ENTRY))
    show.add_argument("--text", action="store_true", help="with its first and last tokens as text")

    _probe_flags(_command(commands, "probe", "how many tokens of a prompt would hit, in which tier, and where the nearest stored sequence diverges"))

    verify = _command(commands, "verify", "read everything and compare checksums; exit code 1 when something is damaged")
    what = verify.add_mutually_exclusive_group()
    what.add_argument("--quarantine", action="store_true", help="set damaged files aside, as a server does when it meets one")
    what.add_argument("--delete", action="store_true", help="delete damaged files, and those that continue them")
    _dry_run(verify, "with --quarantine or --delete: only say what would go")

    prune = _command(commands, "prune", "delete entries that are old, of one model, or stale, the least recently used first")
    _model(prune, "entries of this model: its name, or the beginning of its fingerprint")
    prune.add_argument("--older-than", metavar="AGE", help="entries not used for so long: 90s, 45min, 12h, 30d or 2w")
    prune.add_argument("--stale", action="store_true", help="entries no server here can use: their model's files changed or went, or another mlx or mlx-lm made them")
    prune.add_argument("--to", metavar="SIZE", help="no more than are needed for the directory to take this size")
    _dry_run(prune, "only say what would go")

    export = _command(commands, "export", "write entries with what they continue into one file, to move them to another machine", first=("entry", "ENTRY", ENTRY), optional=True, module="exporting")
    export.add_argument("--all", action="store_true", help="all entries, in place of ENTRY")
    _model(export, "with --all: only entries of this model")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file, a plain tar; it must not exist yet")
    _dry_run(export, "only list what would be written")

    imported = _command(commands, "import", "take in the entries of a file that `export` wrote", first=("file", "FILE", "the file"), module="importing", must_exist=False)
    imported.add_argument("--ssd-cache-max", metavar="SIZE", help="what the directory may take then (default: $MLX_LM_TIERED_SSD_CACHE_MAX, or 32GB)")
    _dry_run(imported, "only check the file and list what would be taken")

    push = _command(commands, "push", "upload entries with what they continue to a shared store", first=("entry", "ENTRY", ENTRY), optional=True, module="pushing")
    push.add_argument("--all", action="store_true", help="all entries that nothing continues, in place of ENTRY")
    _model(push, "with --all: only entries of this model")
    _store(push)
    _dry_run(push, "only list what would be uploaded")

    pull = _command(commands, "pull", "fetch entries of a shared store", first=("entry", "ENTRY", "the beginning of an entry's name in the store"), optional=True, module="pulling", must_exist=False)
    pull.add_argument("--all", action="store_true", help="all entries, in place of ENTRY")
    pull.add_argument("--model", metavar="HEX", help="only entries of this model: the beginning of its fingerprint")
    pull.add_argument("--ssd-cache-max", metavar="SIZE", help="what the directory may take then (default: $MLX_LM_TIERED_SSD_CACHE_MAX, or 32GB)")
    _store(pull)
    _dry_run(pull, "only list what there is and is not here")

    expire = _command(commands, "expire", "delete entries of a shared store that were not used for long, or are too much", module="expiring", needs_directory=False)
    expire.add_argument("--shared-cache-max", metavar="SIZE", help="bytes that the team's entries may take (default: $MLX_LM_TIERED_SHARED_CACHE_MAX, or 100GB)")
    expire.add_argument("--shared-cache-ttl", metavar="AGE", help="age since the last use (default: $MLX_LM_TIERED_SHARED_CACHE_TTL, or 30d)")
    _store(expire)
    _dry_run(expire, "only say how much would go")

    clear = _command(commands, "clear", "delete all entries")
    _dry_run(clear, "only say what would go")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help: str,
    *,
    first: tuple[str, str, str] | None = None,
    optional: bool = False,
    module: str = "",
    must_exist: bool = True,
    needs_directory: bool = True,
    **options: Any,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", **options)
    if first is not None:
        parser.add_argument(first[0], metavar=first[1], help=first[2], nargs="?" if optional else None)
    if needs_directory:
        parser.add_argument("directory", nargs="?", metavar="DIR", help="the SSD tier's directory (default: $MLX_LM_TIERED_SSD_CACHE)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_runner(module or name, must_exist, needs_directory))
    return parser


def _probe_flags(probe: argparse.ArgumentParser) -> None:
    """The prompt; and what decides its tokens and the fingerprint, under the names of the server's own flags."""
    probe.add_argument("--prompt", metavar="TEXT", help="the prompt of a text completion; @FILE reads it from FILE, - from standard input")
    probe.add_argument("--messages", metavar="FILE", help='JSON: a list of messages, or {"messages": […], "tools": […]}')
    probe.add_argument("--server", metavar="URL", help="ask this running server, which knows its RAM tier, too, its model and its flags")
    offline = probe.add_argument_group("without --server", "as the server is started: they decide the tokens, and which entries fit")
    offline.add_argument("--model", metavar="DIR", help="the model's directory, or its hub name if it was fetched before")
    offline.add_argument("--adapter-path", metavar="DIR")
    offline.add_argument("--draft-model", metavar="DIR")
    offline.add_argument("--chat-template", metavar="TEXT")
    offline.add_argument("--use-default-chat-template", action="store_true")
    offline.add_argument("--chat-template-args", default="{}", metavar="JSON")
    offline.add_argument("--trust-remote-code", action="store_true")
    offline.add_argument("--kv-scheme", metavar="SCHEME")
    offline.add_argument("--kv-bits", type=positive, metavar="N")
    offline.add_argument("--kv-group-size", type=positive, default=64, metavar="N")
    offline.add_argument("--quantized-kv-start", type=int, default=5000, metavar="N")
    offline.add_argument("--fingerprint", metavar="HEX", help="look for the entries of this fingerprint, in place of computing it")


def _model(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--model", metavar="NAME", help=help)


def _dry_run(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=help)


def _store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shared-cache", metavar="URL", help="the store (default: $MLX_LM_TIERED_SHARED_CACHE)")
    parser.add_argument("--shared-cache-team", metavar="KEY", help="the team's key (default, and better: $MLX_LM_TIERED_SHARED_CACHE_TEAM)")


def _runner(module: str, must_exist: bool, needs_directory: bool) -> Callable[[argparse.Namespace], int]:
    """The command's `run(args, root)`, with its module imported only then."""

    def run(args: argparse.Namespace) -> int:
        if getattr(args, "all", False) and args.directory is None and needs_directory:
            args.directory, args.entry = args.entry, None  # the only word is DIR
        asks_a_server = getattr(args, "server", None) is not None
        root = None if asks_a_server or not needs_directory else root_of(args.directory, must_exist)
        try:
            return import_module(f"{__name__}.{module}").run(args, root)
        except OSError as error:
            return say(f"{error.filename or root}: {error.strerror or error}", 1)

    return run


def root_of(given: str | os.PathLike[str] | None, must_exist: bool = True) -> Path:
    """The directory of the SSD tier. Raises UsageError when there is none."""
    root = directory(given)
    if root is None:
        usage("which directory? give it, or set MLX_LM_TIERED_SSD_CACHE")
    if must_exist and not root.is_dir():
        usage(f"{root} is not a directory")
    return root
