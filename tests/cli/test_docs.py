"""The documentation says what the code does: settings, hooks, the file format, the commands."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import pytest

from mlx_lm_hooks import specs
from mlx_lm_tiered.cli import settings_table
from mlx_lm_tiered.cold import format as fmt
from mlx_lm_tiered.cold.meta import CompanionMeta, Meta
from mlx_lm_tiered.commands import cache

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


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_between_pages_lead_somewhere(page: str):
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", file.read_text()):
        assert target.startswith("http") or (file.parent / target).exists(), target


def test_every_cache_command_and_flag_is_documented():
    parser = argparse.ArgumentParser()
    cache.add_parsers(parser)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    page = (ROOT / "docs/commands.md").read_text()
    for name, command in commands.choices.items():
        assert f"`{name}`" in page
        flags = {flag for action in command._actions for flag in action.option_strings if flag.startswith("--")}
        missing = [flag for flag in sorted(flags - {"--help", "--output"}) if not re.search(rf"{flag}\b", page)]
        assert not missing, name
