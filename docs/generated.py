"""Pages of the site that are made from the code: every command's flags, the hooks' types, the changes.

A hook of mkdocs (see `mkdocs.yml`). The tables of settings and the sections of hooks
stand in pages that are read without the site, too; `tests/docs` holds those to the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """Measurements come to the menu by themselves, the newest first."""
    pages = sorted((ROOT / "docs/benchmarks").glob("20*.md"), reverse=True)
    config.nav.append({"Measurements": [f"benchmarks/{page.name}" for page in pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, text in {"commands": commands(), "types": types(), "changes": changes()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def commands() -> str:
    """What ``--help`` says, of every command that does something."""
    from mlx_lm_tiered import cli

    page = [
        "# Flags of the commands",
        "What `--help` says. [Commands](../commands.md) says what they are for, [settings](../settings.md) has the flags of the server.",
    ]
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    for parser in cli.command_parsers():
        if parser.prog != f"{cli.PROGRAM} serve":
            page += [f"## `{parser.prog}`", f"```text\n{parser.format_help()}```"]
    return "\n\n".join(page) + "\n"


def types() -> str:
    """The classes of `mlx_lm_hooks`, with the docstrings of their methods."""
    import mlx_lm_hooks

    page = ["# Types of the hooks", "What crosses between mlx-lm and a plugin, from `mlx_lm_hooks`. [Hooks](../hooks.md) has the hooks themselves."]
    for name in mlx_lm_hooks.__all__:
        value = getattr(mlx_lm_hooks, name)
        if inspect.isclass(value) and name != "Plugins":
            page += [f"## `{name}`", *of_class(value)]
    return "\n\n".join(page) + "\n"


def of_class(value: type) -> Iterator[str]:
    yield inspect.cleandoc(value.__doc__ or "")
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        annotations = inspect.get_annotations(value)
        yield "```python\n" + "\n".join(f"{name}: {kind}" for name, kind in annotations.items()) + "\n```"
        return
    for name, member in vars(value).items():
        what = member.fget if isinstance(member, property) else member
        if name.startswith("_") and name != "__len__" or not inspect.isfunction(what):
            continue
        signature = str(inspect.signature(what)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")
        if isinstance(member, property):
            signature = signature.replace("() ->", ":").replace("()", "")
        yield f"**`{name}{signature}`**\n\n{inspect.cleandoc(what.__doc__ or '')}"


def changes() -> str:
    """The change log. Markdown's site dialect wants an empty line before a list."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](../")
    return re.sub(r"^(?![-\s])(.+)\n- ", r"\1\n\n- ", text, flags=re.MULTILINE)
