"""The seams, one module a feature. None of them imports mlx-lm before it is hooked."""

from ..seam import Seam
from . import http, idle, loads, prefill, prefix, rows, scripts, sequential, starting

SEAMS: list[Seam] = [
    seam for module in (starting, prefix, loads, idle, sequential, scripts, http, rows, prefill) for seam in module.SEAMS
]
