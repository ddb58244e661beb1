"""Not a seam of the host: the commands' argument parsers, which `startup` gives the plugins."""

from __future__ import annotations

from ..finder import COMMANDS
from ..seam import Seam

SEAMS = [
    Seam(
        feature="starting",
        module=f"mlx_lm.{command}",
        qualname="argparse",
        kind="global",
        signature="import",
        bodies={},
        why="adds --plugin and the plugins' flags to the command",
        until="upstream has --plugin",
    )
    for command in COMMANDS
]
