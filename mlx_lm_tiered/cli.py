"""``mlx_lm.tiered``: demo, serve, doctor, cache, bench, settings.

Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "mlx_lm.tiered"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Bad input: one sentence on standard error, 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        # All that follows is the server's, its --help too.
        return _guarded(lambda: serve(argv[1:]))
    args = _parser().parse_args(argv)
    return _guarded(lambda: args.run(args))


def _guarded(run: Callable[[], int]) -> int:
    from mlx_lm_hooks import PluginError, UsageError

    try:
        return run()
    except UsageError as error:
        return _say(str(error), 2)
    except PluginError as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)


def _say(text: str, code: int) -> int:
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    return code


def _usage(text: str) -> NoReturn:
    from mlx_lm_hooks import UsageError

    raise UsageError(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="RAM and SSD tiers for mlx-lm's KV caches.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="a long chat that survives a restart of the server")
    demo.add_argument("--model", help="directory or hub name of a model (default: SmolLM2-135M-Instruct, fetched once)")
    demo.add_argument("--ssd-cache", type=Path, metavar="DIR", help="directory of the SSD tier (default: a temporary one)")
    demo.add_argument("--prompt-tokens", type=_positive, metavar="N", help="length of the chat (default: what this machine does in a minute or so)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    demo.add_argument("--prepare", action="store_true", help="only fetch the model; its directory is the last line of the output")
    demo.set_defaults(run=run_demo)

    commands.add_parser("serve", add_help=False, help="mlx_lm.server with the plugin, without the start-up file; takes the server's flags")

    doctor = commands.add_parser("doctor", help="what is installed, what is hooked, what would not work")
    doctor.add_argument("--ssd-cache", metavar="DIR", help="look at this directory of an SSD tier, too (default: $MLX_LM_TIERED_SSD_CACHE)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)

    cache = commands.add_parser("cache", help="list, verify or clear the entries of an SSD tier")
    cache.add_argument("action", choices=["list", "verify", "clear"])
    cache.add_argument("directory", nargs="?", metavar="DIR", help="the SSD tier's directory (default: $MLX_LM_TIERED_SSD_CACHE)")
    cache.add_argument("--dry-run", action="store_true", help="with clear: only say what would go")
    cache.add_argument("--json", action="store_true", help="print JSON")
    cache.set_defaults(run=run_cache)

    settings = commands.add_parser("settings", help="print the table of settings")
    settings.set_defaults(run=run_settings)
    _bench_parsers(commands.add_parser("bench", help="measure, against real server processes"))
    return parser


def _bench_parsers(bench: argparse.ArgumentParser) -> None:
    benches = bench.add_subparsers(metavar="BENCH", required=True)
    restart = benches.add_parser("restart", help="time to first token: cold, from RAM, after a restart")
    restart.add_argument("--prefix-tokens", type=_positive, default=4096, metavar="N", help="length of the prompt (default: 4096)")
    restart.add_argument("--repeats", type=_positive, default=3, metavar="R", help="prompts, each measured three times (default: 3)")
    restart.add_argument("--ssd-cache", type=Path, metavar="DIR", help="directory of the SSD tier (default: a temporary one)")
    restart.set_defaults(run=run_bench_restart)
    overhead = benches.add_parser("overhead", help="decode speed with the tier on over decode speed with it off")
    overhead.add_argument("--prefix-tokens", type=_positive, default=512, metavar="N", help="length of the prompt whose cache waits to be written (default: 512)")
    overhead.add_argument("--decode-tokens", type=_positive, default=96, metavar="N", help="tokens decoded in each measurement (default: 96)")
    overhead.add_argument("--repeats", type=_positive, default=8, metavar="R", help="pairs of measurements (default: 8)")
    overhead.set_defaults(run=run_bench_overhead)
    writes = benches.add_parser("writes", help="bytes that a growing conversation writes, per byte of its new tokens' KV")
    writes.add_argument("--turns", type=_positive, default=20, metavar="N", help="turns of the conversation, each flushed (default: 20)")
    writes.add_argument("--turn-tokens", type=_positive, default=200, metavar="N", help="tokens of a user's turn (default: 200)")
    writes.set_defaults(run=run_bench_writes)
    for parser in (restart, overhead, writes):
        parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    start_up = benches.add_parser("start-up", help="what the start-up file costs an unrelated script")
    start_up.add_argument("--repeats", type=_positive, default=40, metavar="R", help="starts with and without it (default: 40)")
    start_up.set_defaults(run=run_bench_start_up)
    for parser in (restart, overhead, writes, start_up):
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


# The commands. Each takes its parsed arguments and returns the exit code.


def serve(argv: Sequence[str]) -> int:
    """``mlx_lm.server ARGV`` with the plugin."""
    from mlx_lm_hooks import find_host

    from . import openblas

    openblas.load()
    asked = any(arg == "--plugin" or arg.startswith("--plugin=") for arg in argv)
    find_host().launch("server", list(argv) if asked else ["--plugin", "tiered", *argv])
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from .demo.command import demo, prepare

    if args.prepare:
        if args.model or args.json or args.ssd_cache or args.prompt_tokens:
            _usage("--prepare only fetches the demo's own model; leave the other flags out")
        return prepare()
    _end_in_order()
    return demo(_model(args.model), args.ssd_cache, args.prompt_tokens, args.json)


def run_doctor(args: argparse.Namespace) -> int:
    from .doctor import describe, examine

    report = examine(_directory(args.ssd_cache))
    print(json.dumps(report.as_json(), indent=2) if args.json else describe(report))
    return 1 if report.problems else 0


def run_cache(args: argparse.Namespace) -> int:
    root = _directory(args.directory)
    if root is None:
        _usage("which directory? give it, or set MLX_LM_TIERED_SSD_CACHE")
    if not root.is_dir():
        _usage(f"{root} is not a directory")
    if args.dry_run and args.action != "clear":
        _usage("--dry-run goes with clear")
    from . import cache_command
    from .settings import format_size

    try:
        if args.action == "clear":
            count, size = cache_command.clear(root, args.dry_run)
            text = f"{_entries(count)}, {format_size(size)}: {'would be deleted' if args.dry_run else 'deleted'}"
            print(json.dumps({"entries": count, "bytes": size, "dry_run": args.dry_run}) if args.json else text)
            return 0
        listed = list(cache_command.entries(root, verify=args.action == "verify"))
    except OSError as error:
        return _say(f"{error.filename or root}: {error.strerror}", 1)
    damaged = [entry for entry in listed if entry.fault]
    if args.json:
        print(json.dumps([entry.as_json() for entry in listed], indent=2))
    else:
        print(cache_command.table(listed))
        print(f"{_entries(len(listed))}, {format_size(sum(e.bytes for e in listed))}, {len(damaged)} damaged")
    return 1 if damaged else 0


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def run_settings(args: argparse.Namespace) -> int:
    print(settings_table())
    return 0


def settings_table() -> str:
    """Every setting, as the table in Markdown that the documentation holds."""
    from .settings import table

    rows = [("flag", "environment", "default", "what it does"), ("---",) * 4]
    rows += [(f"`{flag}`", f"`{env}`", default, text.replace("|", "\\|")) for flag, env, default, text in table()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def run_bench_restart(args: argparse.Namespace) -> int:
    from .bench import restart

    return _bench(
        args,
        lambda: restart.run(Path(_model(args.model)), args.prefix_tokens, args.repeats, directory=_directory(args.ssd_cache, environment=False)),
        lambda result: [] if result["text_equal"] else ["the answers differ"],
    )


def run_bench_overhead(args: argparse.Namespace) -> int:
    from .bench import overhead

    return _bench(
        args,
        lambda: overhead.run(Path(_model(args.model)), args.prefix_tokens, args.decode_tokens, args.repeats),
        lambda result: [] if result["text_equal"] else ["the answers differ"],
    )


def run_bench_writes(args: argparse.Namespace) -> int:
    from .bench import writes

    return _bench(
        args,
        lambda: writes.run(Path(_model(args.model)), args.turns, args.turn_tokens),
        lambda result: [] if result["ram_and_restart_equal"] else ["the answers differ"],
    )


def run_bench_start_up(args: argparse.Namespace) -> int:
    from .bench import startup

    return _bench(args, lambda: startup.run(args.repeats), lambda result: [])


def _bench(args: argparse.Namespace, measure: Callable[[], dict[str, Any]], faults: Callable[[dict[str, Any]], list[str]]) -> int:
    from .bench import report
    from .bench.client import RequestFailed
    from .bench.server import ServerFailed

    _writable(args.json)
    _end_in_order()
    try:
        result = measure()
    except (RequestFailed, ServerFailed) as error:
        return _say(str(error), 1)
    report.write(result, args.json)
    print(report.lines(result))
    found = faults(result)
    return _say("; ".join(found), 1) if found else 0


def _end_in_order() -> None:
    """SIGTERM, and the end of the terminal, unwind like Ctrl-C: the servers started here have sessions of their own and would stay."""

    def unwind(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, unwind)


# Input.


def _model(name: str | None) -> str | None:
    """A model as the server takes it: a directory's path, or a hub name as it is."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            _usage(f"{name} holds no config.json, so it is not a model's directory")
        return str(path.absolute())
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        _usage(f"there is no model in {name}")
    return name


def _directory(given: str | os.PathLike[str] | None, environment: bool = True) -> Path | None:
    """The SSD tier's directory from a flag, else from the environment."""
    from .settings import env_name, parse_directory

    text = given if given is not None else os.environ.get(env_name("ssd_cache")) if environment else None
    if not text:
        return None
    try:
        return parse_directory(text)
    except ValueError as error:
        _usage(str(error))


def _writable(file: Path | None) -> None:
    """Find out before minutes of measuring that the result has no place to go."""
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        _usage(f"{file} cannot be written to")


if __name__ == "__main__":
    sys.exit(main())
