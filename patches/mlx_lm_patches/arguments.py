"""The `argparse` that a command's module sees while plugins are asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from mlx_lm_hooks.manager import Plugins, installed_plugins, names_from_environment, split_names
from mlx_lm_hooks.types import Invocation, PluginError, UsageError

STRICT_ENV = "MLX_LM_PLUGIN_STRICT"


class Argparse:
    """Everything of `argparse`, except that parsers load, describe, check and activate the plugins."""

    def __init__(self, command: str):
        class ArgumentParser(argparse.ArgumentParser):
            def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
                argv = list(sys.argv[1:] if args is None else args)
                if not (names_from_environment() or _flag_values(argv) is not None):
                    return super().parse_args(args, namespace)
                return _parse(self, super().parse_args, command, argv, namespace)

        self.ArgumentParser = ArgumentParser

    def __getattr__(self, name: str) -> Any:
        return getattr(argparse, name)


def strict_from_environment() -> bool:
    """Whether ``MLX_LM_PLUGIN_STRICT`` is set to something that means yes."""
    return os.environ.get(STRICT_ENV, "").strip().lower() not in ("", "0", "false", "no", "off")


def _flag_values(argv: Sequence[str]) -> list[str] | None:
    """The values of ``--plugin``; None when neither it nor ``--plugin-strict`` is given.

    A missing value is left for the full parser, which explains it with its usage.
    """
    values: list[str] = []
    seen = False
    for at, arg in enumerate(argv):
        if arg == "--":
            break
        if arg == "--plugin":
            seen = True
            values += argv[at + 1 : at + 2]
        elif arg.startswith("--plugin="):
            seen = True
            values.append(arg.partition("=")[2])
        elif arg == "--plugin-strict":
            seen = True
    return values if seen else None


def _parse(parser: argparse.ArgumentParser, parse: Any, command: str, argv: list[str], namespace: Any) -> Any:
    from . import ranks
    from .host import host

    def refuse(error: PluginError) -> None:
        parser.exit(2, f"{parser.prog}: error: {error}\n")

    values = _flag_values(argv) or []
    try:
        # A flag where the name should be is a missing value: argparse says so below.
        plugins = Plugins.load(split_names([v for v in values if not v.startswith("-")] + names_from_environment()))
    except PluginError as error:
        refuse(error)
        raise
    group = parser.add_argument_group("plugins")
    group.add_argument(
        "--plugin",
        action="append",
        metavar="NAME",
        help="Load an installed plugin; repeat it or separate names with commas (env MLX_LM_PLUGINS)",
    )
    group.add_argument(
        "--plugin-strict",
        action="store_true",
        default=strict_from_environment(),
        help=f"Refuse to start when a part of mlx-lm that a plugin hooks is not one it was tested with (env {STRICT_ENV})",
    )
    plugins.add_arguments(parser, command)
    args, given = parse_given(parser, parse, argv, namespace)
    try:
        if not plugins.names:
            known = ", ".join(sorted(installed_plugins())) or "none"
            raise UsageError(f"name a plugin with --plugin (installed: {known})")
        invocation = Invocation(command, args, given, ranks.join(command, args))
        plugins.configure(invocation)
        host.activate(plugins, invocation)
    except PluginError as error:
        plugins.unconfigure()
        refuse(error)
    return args


class _Default(str):
    """A string default that argparse does not take for its own object, and so leaves alone."""


class _Recorder(argparse.Namespace):
    """A namespace that notes which attributes the parser's actions set."""

    def __init__(self) -> None:
        object.__setattr__(self, "_given", set())

    def __setattr__(self, name: str, value: Any) -> None:
        self._given.add(name)
        object.__setattr__(self, name, value)


def parse_given(
    parser: argparse.ArgumentParser, parse: Any, argv: Sequence[str], namespace: Any = None
) -> tuple[argparse.Namespace, frozenset[str]]:
    """Parse, and tell which arguments were given explicitly, be it with their default value.

    argparse sets defaults and values the same way. So the defaults are put in
    first, unrecorded; string defaults as another object, because argparse would
    convert, and thereby set, those that are still the default at the end.
    """
    recorder = _Recorder()
    actions = [a for a in parser._actions if a.dest is not argparse.SUPPRESS and a.default is not argparse.SUPPRESS]
    defaults: dict[str, argparse.Action] = {}
    for action in actions:
        if action.dest not in defaults and not hasattr(namespace, action.dest):
            defaults[action.dest] = action
            value = _Default(action.default) if isinstance(action.default, str) else action.default
            object.__setattr__(recorder, action.dest, value)
    for name, value in vars(namespace).items() if namespace is not None else ():
        object.__setattr__(recorder, name, value)
    parse(argv, recorder)
    given = frozenset(recorder._given)
    result = argparse.Namespace() if namespace is None else namespace
    for name, value in vars(recorder).items():
        if name == "_given":
            continue
        if isinstance(value, _Default):
            action = defaults[name]
            value = parser._get_value(action, action.default)
        setattr(result, name, value)
    return result, given
