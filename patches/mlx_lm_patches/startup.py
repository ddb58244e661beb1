"""What happens when a watched module has been imported and plugins were asked for."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from . import finder

_launched: str | None = None
_script_started = False


def set_command(command: str) -> None:
    """Say which command this process is, where its command line does not (a launcher of our own)."""
    global _launched
    _launched = command


def current_command() -> str | None:
    """``server``, ``generate``, ``chat``, or None for a script."""
    return _launched or finder.command()


def loaded(module: ModuleType) -> None:
    """A watched module has just run: hook it, give a command its parser, or start a script's plugins."""
    from .host import host

    if host.active:
        host.module_loaded(module)
    command = current_command()
    if command is not None:
        if module.__name__ == f"mlx_lm.{command}":
            bind(module, command)
    elif not host.active:
        _start_script()


def bind(module: Any, command: str) -> None:
    """Give a command's module an `argparse` whose parser knows the plugins."""
    from .arguments import Argparse

    if not isinstance(module.argparse, Argparse):
        module.argparse = Argparse(command)


def _start_script() -> None:
    """Enable the plugins of the environment in a script; they read their settings there too."""
    global _script_started
    if _script_started:
        return
    from mlx_lm_hooks.manager import enable, names_from_environment
    from mlx_lm_hooks.types import PluginError

    names = names_from_environment()
    if not names:
        return
    _script_started = True
    try:
        enable(names)
    except PluginError as error:
        print(f"mlx_lm plugins: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_as_main(name: str) -> None:
    """Replay a module's ``if __name__ == "__main__"`` block in the imported module's namespace.

    So upstream's own words (its deprecation message) are printed, and the `main`
    that runs is the hooked module's.
    """
    module = import_module(name)
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read(), module.__file__)
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            block = ast.Module(body=node.body, type_ignores=[])
            exec(compile(block, module.__file__, "exec"), module.__dict__)
