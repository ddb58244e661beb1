"""``mlx_lm.tiered``: demo, serve, top, doctor, cache, bench, settings.

Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .commands import bench, cache
from .commands.terminal import PROGRAM, directory, end_in_order, interval, model, positive, say, usage


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
        return say(str(error), 2)
    except PluginError as error:
        return say(str(error), 1)
    except KeyboardInterrupt:
        return say("interrupted", 130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="RAM and SSD tiers for mlx-lm's KV caches.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="a long chat that survives a restart of the server")
    demo.add_argument("--model", help="directory or hub name of a model (default: SmolLM2-135M-Instruct, fetched once)")
    demo.add_argument("--ssd-cache", type=Path, metavar="DIR", help="directory of the SSD tier (default: a temporary one)")
    demo.add_argument("--prompt-tokens", type=positive, metavar="N", help="length of the chat (default: what this machine does in a minute or so)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    demo.add_argument("--prepare", action="store_true", help="only fetch the model; its directory is the last line of the output")
    demo.set_defaults(run=run_demo)

    commands.add_parser("serve", add_help=False, help="mlx_lm.server with the plugin, without the start-up file; takes the server's flags")

    top = commands.add_parser("top", help="what a running server's tiers hold and do, live in the terminal")
    top.add_argument("--server", default="http://127.0.0.1:8080", metavar="URL", help="the server's address (default: http://127.0.0.1:8080)")
    top.add_argument("--every", type=interval, metavar="SECONDS", help="seconds between two looks (default: 1 on a terminal; elsewhere it looks once)")
    top.add_argument("--once", action="store_true", help="look once")
    top.set_defaults(run=run_top)

    doctor = commands.add_parser("doctor", help="what is installed, what is hooked, what would not work")
    doctor.add_argument("--ssd-cache", metavar="DIR", help="look at this directory of an SSD tier, too (default: $MLX_LM_TIERED_SSD_CACHE)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)

    cache.add_parsers(commands.add_parser("cache", help="look into, check, prune, move the entries of an SSD tier"))
    settings = commands.add_parser("settings", help="print the table of settings")
    settings.set_defaults(run=run_settings)
    bench.add_parsers(commands.add_parser("bench", help="measure, against real server processes"))
    return parser


# The commands. Each takes its parsed arguments and returns the exit code.


def serve(argv: Sequence[str]) -> int:
    """``mlx_lm.server ARGV`` with the plugin."""
    from mlx_lm_hooks import find_host

    from . import openblas

    openblas.load()
    asked = any(arg == "--plugin" or arg.startswith("--plugin=") for arg in argv)
    find_host().launch("server", list(argv) if asked else ["--plugin", "tiered", *argv])
    return 0


def command_parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands that have none below them, each once."""
    parser = parser or _parser()
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for command in dict.fromkeys(action.choices.values()):
            yield from command_parsers(command)


def run_demo(args: argparse.Namespace) -> int:
    from .demo.command import demo, prepare

    if args.prepare:
        if args.model or args.json or args.ssd_cache or args.prompt_tokens:
            usage("--prepare only fetches the demo's own model; leave the other flags out")
        return prepare()
    end_in_order()
    return demo(model(args.model), args.ssd_cache, args.prompt_tokens, args.json)


def run_top(args: argparse.Namespace) -> int:
    from .commands.top import run

    return run(args)


def run_doctor(args: argparse.Namespace) -> int:
    from .doctor import describe, examine

    report = examine(directory(args.ssd_cache))
    print(json.dumps(report.as_json(), indent=2) if args.json else describe(report))
    return 1 if report.problems else 0


def run_settings(args: argparse.Namespace) -> int:
    print(settings_table())
    return 0


def settings_table() -> str:
    """Every setting, as the table in Markdown that the documentation holds."""
    from .settings import table

    rows = [("flag", "environment", "default", "what it does"), ("---",) * 4]
    rows += [(f"`{flag}`", f"`{env}`", default, text.replace("|", "\\|")) for flag, env, default, text in table()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
