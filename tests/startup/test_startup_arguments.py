"""The finder's reading of a command line, and the parser's reading of arguments."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import ModuleSpec, PathFinder

import pytest

from mlx_lm_patches import finder
from mlx_lm_patches.arguments import Argparse, parse_given
from mlx_lm_patches.startup import run_as_main

PROGRAMS = [
    (["python", "/v/bin/mlx_lm.server", "--plugin", "x"], "mlx_lm.server"),
    (["python", "/v/bin/mlx_lm", "server"], "mlx_lm"),
    (["python", "-m", "mlx_lm", "server"], "mlx_lm"),
    (["python", "-mmlx_lm.server"], "mlx_lm.server"),
    (["python", "-Im", "mlx_lm.chat"], "mlx_lm.chat"),
    (["python", "-X", "utf8", "-W", "ignore", "-u", "-m", "mlx_lm.server"], "mlx_lm.server"),
    (["python", "-Xutf8", "-Wignore", "own.py", "-m", "mlx_lm.server"], "own.py"),
    (["python", "--check-hash-based-pycs", "always", "own.py"], "own.py"),
    (["python", "-c", "code", "-m", "mlx_lm.server"], ""),
    (["python", "-"], "-"),
    (["python"], ""),
    ([], ""),
]


@pytest.mark.parametrize(("argv", "name"), PROGRAMS)
def test_the_program_of_a_process(argv, name):
    assert finder.program(argv)[0] == name


REQUESTED = [
    ("mlx_lm.server --plugin tiered", "", True),
    ("mlx_lm.server --plugin=tiered", "", True),
    ("mlx_lm.server --plugin-strict", "", True),
    ("mlx_lm.server --model m", "", False),
    ("mlx_lm.server --model m", "tiered", True),
    ("mlx_lm generate --plugin tiered", "", True),
    ("mlx_lm lora --plugin tiered", "", False),
    ("-m mlx_lm.chat --plugin tiered", "", True),
    ("own.py --plugin tiered", "", False),
    ("own.py", "tiered", True),
    ("own.py", " , ", False),
    ("mlx_lm.tiered doctor", "tiered", False),
    ("mlx_lm.tiered doctor", "other", True),
]


@pytest.mark.parametrize(("line", "environment", "wanted"), REQUESTED)
def test_whether_plugins_are_asked_for(monkeypatch, line, environment, wanted):
    monkeypatch.setattr(sys, "orig_argv", ["python", *line.split()])
    monkeypatch.setenv("MLX_LM_PLUGINS", environment)
    assert finder.requested() is wanted


def test_the_finder_looks_past_itself_and_survives_its_like(monkeypatch):
    """Another finder that also walks the path, and so asks ours again."""

    class Walker:
        def find_spec(self, name, path=None, target=None):
            for other in sys.meta_path:
                if other is not self and (spec := other.find_spec(name, path, target)) is not None:
                    return spec
            return None

    class Source:
        asked = 0

        def find_spec(self, name, path=None, target=None):
            Source.asked += 1
            return ModuleSpec(name, loader=object())

    ours = finder.Finder()
    ours.wanted = True
    monkeypatch.setattr(sys, "meta_path", [ours, Walker(), Source()])
    spec = ours.find_spec("mlx_lm.server")
    assert isinstance(spec.loader, finder.Loader) and not isinstance(spec.loader.inner, finder.Loader)
    assert ours.find_spec("mlx_lm.utils") is None and ours.find_spec("server") is None
    assert Source.asked == 1


def test_two_installs_are_one(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    assert finder.install() is finder.install()
    assert len(sys.meta_path) == 2


def test_the_loader_is_otherwise_the_inner_one():
    loader = PathFinder.find_spec("json").loader
    wrapped = finder.Loader(loader)
    assert wrapped.get_source("json") == loader.get_source("json") and wrapped.path == loader.path
    assert wrapped.is_package("json") and wrapped.get_resource_reader("json") is not None
    with pytest.raises(AttributeError):
        wrapped.no_such_thing  # noqa: B018


def test_main_block_runs_in_the_modules_namespace(tmp_path, monkeypatch, capsys):
    (tmp_path / "has_main_block.py").write_text(
        "def main():\n    print('main of', __name__)\n\n\nif __name__ == '__main__':\n    print('words')\n    main()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run_as_main("has_main_block")
    assert capsys.readouterr().out == "words\nmain of has_main_block\n"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="command")
    result.add_argument("--number", type=int, default=3)
    result.add_argument("--text", default="none")
    result.add_argument("--json", type=json.loads, default="{}")
    result.add_argument("--flag", action="store_true")
    result.add_argument("--many", action="append")
    result.add_argument("--more", action="append", default=["a"])
    result.add_argument("--count", "-c", action="count", default=0)
    result.add_argument("--list", nargs="*", default=())
    result.add_argument("--hidden", default=argparse.SUPPRESS)
    result.add_argument("--same-a", dest="same", action="store_const", const=1)
    result.add_argument("--same-b", dest="same", action="store_const", const=2)
    return result


LINES = [
    ("", set()),
    ("--number 3", {"number"}),
    ("--text none --json {}", {"text", "json"}),
    ("--flag --many x --many y --more b -cc", {"flag", "many", "more", "count"}),
    ("--list --hidden h --same-b", {"list", "hidden", "same"}),
]


@pytest.mark.parametrize(("line", "given"), LINES)
def test_given_arguments_are_told_from_defaults(line, given):
    argv = line.split()
    result, found = parse_given(parser(), parser().parse_args, argv)
    assert found == given
    stock = parser().parse_args(argv)
    assert result == stock and {k: type(v) for k, v in vars(result).items()} == {k: type(v) for k, v in vars(stock).items()}


def test_a_callers_namespace_is_filled():
    mine = argparse.Namespace(number=9, own=1)
    result, given = parse_given(parser(), parser().parse_args, ["--text", "t"], mine)
    assert result is mine and (mine.number, mine.own, mine.text) == (9, 1, "t") and given == {"text"}


def test_the_shim_forwards_everything_else(monkeypatch):
    monkeypatch.delenv("MLX_LM_PLUGINS", raising=False)
    shim = Argparse("server")
    assert shim.Namespace is argparse.Namespace and shim.SUPPRESS is argparse.SUPPRESS
    mine = shim.ArgumentParser(prog="p")
    mine.add_argument("--a")
    assert isinstance(mine, argparse.ArgumentParser) and mine.parse_args(["--a", "1"]) == argparse.Namespace(a="1")
