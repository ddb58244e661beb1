"""The arrows between the three parts, and the order of the plugin's rooms: nothing imports what stands above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "mlx_lm_tiered"
PARTS = {"mlx_lm_hooks": ROOT / "hooks/mlx_lm_hooks", "mlx_lm_patches": ROOT / "patches/mlx_lm_patches", "mlx_lm_tiered": PLUGIN}
MAY_IMPORT = {"mlx_lm_hooks": set(), "mlx_lm_patches": {"mlx_lm_hooks"}, "mlx_lm_tiered": {"mlx_lm_hooks"}}


def imports(path: Path, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What the module at `path` in `package` imports, anywhere in it, by dotted names' parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names)


def modules(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for path in sorted(root.rglob("*.py")):
        yield path, (root.name, *path.relative_to(root).parent.parts)


def rooms() -> list[str]:
    """The rooms as the architecture has them, the highest first."""
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.partition("## Rooms of the plugin")[2].partition("```\n")[2].partition("```")[0]
    return re.findall(r"^(\w+)(?:/|\.py) ", block, re.MULTILINE)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may_know(part: str):
    for path, package in modules(PARTS[part]):
        known = {name[0] for name in imports(path, package)} & PARTS.keys()
        assert known <= MAY_IMPORT[part] | {part}, path


def test_every_room_is_in_the_architecture_once():
    there = {path.stem for path in PLUGIN.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(rooms()) == sorted(there)


def test_a_room_stands_above_what_it_imports():
    order = {room: place for place, room in enumerate(rooms())}
    below = []
    for path, package in modules(PLUGIN):
        own = (*package[1:], path.stem)[0]
        for name in imports(path, package):
            # A name of the package itself (its version) is no room.
            if name[0] == PLUGIN.name and len(name) > 1 and (room := name[1]) in order and order[room] < order[own]:
                below.append(f"{path.relative_to(ROOT)} imports {room}")
    assert not below
