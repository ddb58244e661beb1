"""What commands share: what they say, what they take."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn, overload

from ..progress import Progress

PROGRAM = "mlx_lm.tiered"


def say(text: str, code: int) -> int:
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    return code


def usage(text: str) -> NoReturn:
    from mlx_lm_hooks import UsageError

    raise UsageError(text)


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def interval(text: str) -> float:
    """Seconds between two looks."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.2 on")
    return value


def count(parser: argparse.ArgumentParser, flag: str, default: int, text: str, metavar: str = "N") -> None:
    """A flag that takes a positive whole number; `text` says what it counts."""
    parser.add_argument(flag, type=positive, default=default, metavar=metavar, help=f"{text} (default: {default})")


def end_in_order() -> None:
    """SIGTERM, and the end of the terminal, unwind like Ctrl-C: the servers started here have sessions of their own and would stay."""

    def unwind(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, unwind)


@overload
def model(name: str) -> str: ...
@overload
def model(name: None) -> None: ...
def model(name: str | None) -> str | None:
    """A model as the server takes it: a directory's path, or a hub name as it is."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            usage(f"{name} holds no config.json, so it is not a model's directory")
        return str(path.absolute())
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        usage(f"there is no model in {name}")
    return name


def directory(given: str | os.PathLike[str] | None, environment: bool = True) -> Path | None:
    """The SSD tier's directory from a flag, else from the environment."""
    from ..settings import env_name, parse_directory

    text = given if given is not None else os.environ.get(env_name("ssd_cache")) if environment else None
    if not text:
        return None
    try:
        return parse_directory(text)
    except ValueError as error:
        usage(str(error))


def writable(file: Path | None) -> None:
    """Find out before minutes of measuring that the result has no place to go."""
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        usage(f"{file} cannot be written to")


def bytes_bar(step: str) -> Progress:
    """A progress bar that counts bytes."""
    from ..settings import format_size

    return Progress(step, amount=lambda done, total: f"{format_size(done)}/{format_size(total)}", ended="at the end")
