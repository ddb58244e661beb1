"""The tutorial and the how-tos do what they say: a reader goes through each, block by block."""

from __future__ import annotations

import configparser
import plistlib
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
from doc_pages import DOCS, Reader, blocks

from mlx_lm_tiered.bench.server import reserved_port
from mlx_lm_tiered.demo.model import NAME
from support.models import TINY


@pytest.fixture
def port():
    with reserved_port() as held:
        yield held.getsockname()[1]


def numbers(text: str) -> list[list[int]]:
    """(reused, of) of each line that says so."""
    return [[int(n) for n in found] for found in re.findall(r"(\d+) of (\d+) prompt tokens reused", text)]


def test_the_tutorial(tmp_path: Path, port: int):
    home, clone = tmp_path / "home", tmp_path / "clone"
    home.mkdir()
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/activate").touch()
    (clone / "docs").mkdir()
    for name in ("security.md", "memory.md"):
        shutil.copy(DOCS / name, clone / "docs")
    # The tests' model in place of the one that would be fetched and computes a hundred times as long.
    shutil.copytree(TINY["llama"], home / "cache/mlx-lm-tiered" / NAME)
    said = []
    with Reader(home, clone, port, {}, XDG_CACHE_HOME=str(home / "cache")) as reader:
        for block in blocks(DOCS / "getting-started.md"):
            if block.section == "Install" and "pip" in block.text:
                continue  # tests/startup installs; here the tests' environment is the reader's
            reader.do(block)
            if "ask.py" in block.text and block.language == "sh":
                said += numbers(reader.output)
        stats = reader.client.stats()
    (cold, of), (again, _), (other, longer), (restarted, _) = said
    assert cold == 0 and again == restarted == of - 1 and longer * 0.9 < other < longer
    assert stats["tokens_saved_by_tier"]["ssd"] == restarted
    assert re.search(r"\n0 tokens reused\n(.|\n)*\n[1-9]\d+ tokens reused\n$", reader.output)


# The models that the how-tos name, and those that stand in for them.
MODELS = {
    "mlx-community/Qwen3-4B-Instruct-2507-4bit": str(TINY["llama"]),
    "mlx-community/gemma-3-1b-it-4bit": str(TINY["gemma3_text"]),
    "affine:8": "affine:8:32",  # their heads have 32 dimensions
}
# What cannot be run here: other machines, what manages services, installing. These take any arguments.
STUBS = ("systemctl", "journalctl", "launchctl", "scp", "pip")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for name in STUBS:
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def reader(tmp_path: Path, port: int, stubs: Path):
    (tmp_path / "home").mkdir()
    with Reader(tmp_path / "home", tmp_path / "home", port, MODELS, stubs) as reader:
        yield reader


def test_a_coding_agent(reader: Reader):
    for block in blocks(DOCS / "howto/coding-agent.md"):
        reader.do(block)
    deadline = time.monotonic() + 60
    while not (warm := reader.client.stats()["warm"])["done"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert warm["prompts"] == warm["prefilled"] == 1


def test_several_models(reader: Reader):
    for block in blocks(DOCS / "howto/several-models.md"):
        if "prune" in block.text:
            reader.stop()  # which saves: what the next commands look at is whole
        if "--model" in block.text and "prune" in block.text:
            # A local model is called by its directory's name.
            block = block._replace(text=block.text.replace("mlx-community/gemma-3-1b-it-4bit", TINY["gemma3_text"].name))
        reader.do(block)
        if "cache ls" in block.text:
            assert "tiny-llama" in reader.output and "tiny-gemma3_text" in reader.output
    assert "gone" in reader.output or "deleted" in reader.output, reader.output


@pytest.mark.parametrize("page", ["small-disk", "laptop", "cuda"])
def test_one_server(page: str, reader: Reader):
    import mlx.core as mx

    for block in blocks(DOCS / f"howto/{page}.md"):
        if block.title == "needs a GPU":
            if mx.default_device() == mx.cpu:
                continue
            block = block._replace(title="")
        reader.do(block)


def test_a_service_and_a_move(reader: Reader, tmp_path: Path):
    """The units' command is run as a unit would; what it has stored is moved to another home."""
    page = list(blocks(DOCS / "howto/service.md"))
    for block in page:
        if block.language == "ini":
            reader.do(block)
            unit = configparser.ConfigParser(interpolation=None)
            unit.optionxform = str  # type: ignore[assignment, method-assign]
            unit.read(reader.home / block.title[2:])
            command = unit["Service"]["ExecStart"]
            assert int(unit["Service"]["TimeoutStopSec"]) > 120
            reader.serve(command.replace("%h/mlx/bin/", "").replace("%h", str(reader.home)) + "\n")
        elif block.language == "xml":
            reader.do(block)
            job = plistlib.loads((reader.home / block.title[2:]).read_bytes())
            assert shlex.join(job["ProgramArguments"]) == command.replace("%h", "/Users/me")
            assert job["ExitTimeOut"] > 120
        else:
            reader.do(block)
    reader.client.complete("What is a prefix?", max_tokens=4)
    reader.stop()

    other = tmp_path / "other"
    other.mkdir()
    for block in blocks(DOCS / "howto/move-a-cache.md"):
        if block.section == "On the other machine" and reader.home != other:
            (reader.home / "kv.tar").rename(other / "kv.tar")
            reader.home = reader.folder = other
            reader.environ["HOME"] = str(other)
        reader.do(block)
    assert "tiny-llama" in reader.output


RUN_PAGES = ["getting-started.md", *sorted(f"howto/{path.name}" for path in (DOCS / "howto").iterdir())]


def test_every_how_to_is_gone_through():
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [page for page in RUN_PAGES if Path(page).stem not in tests] == []


def test_every_flag_that_the_pages_name_exists():
    """Also those in the text, which nobody runs."""
    import argparse

    from mlx_lm_tiered import cli, settings

    known = {"--plugin", "--model", "--port", "--host", "--help"} | {flag for flag, *_ in settings.table()}
    known |= {"--no-" + flag[2:] for flag in known}
    parsers = [cli._parser()]
    while parsers:
        for action in parsers.pop()._actions:
            known.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    others = {"--fail", "--silent", "--user", "--now", "--lines"}  # curl's, systemd's
    for page in RUN_PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / page).read_text(encoding="utf-8")))
        assert named - known - others == set(), page
