"""The documentation says what the code does: settings, hooks, the file format, the commands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from mlx_lm_hooks import specs
from mlx_lm_tiered.cli import command_parsers, settings_table
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.meta import CompanionMeta, Meta
from mlx_lm_tiered.serving.metric_table import HISTOGRAMS, METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [name for name in vars(specs) if name.startswith("mlx_lm_")]


@pytest.mark.parametrize("page", ["README.md", "docs/settings.md"])
def test_the_table_of_settings_is_the_codes(page: str):
    assert settings_table() in (ROOT / page).read_text(), "replace the table by what `mlx_lm.tiered settings` prints"


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str):
    hook = getattr(specs, name)
    section = (ROOT / "docs/hooks.md").read_text().partition(f"## `{name}`")[2].partition("\n## ")[0]
    assert f"def {name}{str(inspect.signature(hook)).replace(chr(39), '')}" in section
    assert inspect.getdoc(hook) in section


def test_no_hook_is_documented_that_there_is_not():
    assert re.findall(r"^## `(\w+)`", (ROOT / "docs/hooks.md").read_text(), re.MULTILINE) == HOOKS


def test_every_key_of_an_entrys_header_is_documented():
    import json

    header = fmt.layout(Meta("ab" * 16, "", 1, (), [], companion=CompanionMeta("draft", 1)))
    keys = json.loads(bytes(header[8:]))["__metadata__"].keys()
    page = (ROOT / "docs/file-format.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(keys)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str):
    """Those between the pages of the site are followed when it is built (`test_site.py`), with their anchors."""
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


# Where a command is documented, by its second word: those of `bench` have a table of their own.
COMMANDS = {command.prog.split(" ", 1)[1]: command for command in command_parsers()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str):
    page = (ROOT / ("docs/benchmarks/README.md" if name.startswith("bench ") else "docs/commands.md")).read_text()
    assert re.search(rf"`?mlx_lm\.tiered {name}\b", page)


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.startswith("bench ")])
def test_every_flag_of_a_command_is_documented(name: str):
    """The flags of benchmarks stand in `--help`, and so on the site."""
    page = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    flags = {flag for action in COMMANDS[name]._actions for flag in action.option_strings if flag.startswith("--")}
    assert [flag for flag in sorted(flags - {"--help"}) if not re.search(rf"{flag}\b", page)] == []


def test_every_metric_is_documented():
    page = (ROOT / "docs/metrics.md").read_text()
    names = [PREFIX + name for name in (*(metric.name for metric in METRICS), *HISTOGRAMS)]
    assert names and [name for name in names if name not in page] == []
