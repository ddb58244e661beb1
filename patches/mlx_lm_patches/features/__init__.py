"""The seams, one module a feature. None of them imports mlx-lm before it is hooked."""

from ..seam import Seam
from . import http, idle, loads, prefix, rows, scripts, sequential, starting

SEAMS: list[Seam] = [
    seam for module in (starting, prefix, loads, idle, sequential, scripts, http, rows) for seam in module.SEAMS
]
