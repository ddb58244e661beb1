"""The seams, one module a feature. None of them imports mlx-lm before it is hooked."""

from ..seam import Seam
from . import admission, checkpoints, clients, http, idle, isolation, loads, prefill, prefix, ranks, rings, rows, schemes, scripts, sequential, speculation, starting

SEAMS: list[Seam] = [
    seam
    for module in (starting, prefix, loads, idle, sequential, checkpoints, scripts, http, rows, rings, prefill, clients, isolation, schemes, admission, speculation, ranks)
    for seam in module.SEAMS
]
