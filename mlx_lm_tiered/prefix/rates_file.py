"""The file of measured rates in the cache directory. What stands in it decides how fast an answer comes, never which; it is checked all the same."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from .. import private_file

logger = logging.getLogger("mlx_lm_tiered")

NAME = "rates.json"  # in the cache directory
MAX_BYTES = 32 << 10
MAX_MODELS = 8
LEAST = 1e-9  # seconds: nothing that is measured takes less, and quotients of less leave a float's range
_FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")

Chunk = tuple[int, int, float]
Restored = tuple[int, float, float]
Found = dict[str, tuple[list[Chunk], list[Restored]]]


def read(path: Path) -> Found:
    """The measurements by fingerprint, least recently written first; what is not sound is left out."""
    try:
        data = private_file.read(path, MAX_BYTES + 1)
        if data is None or len(data) > MAX_BYTES:
            return {}
        content = json.loads(data)
        models = content["models"] if content["version"] == 1 else {}
        return {fingerprint: _sound(model) for fingerprint, model in models.items() if _FINGERPRINT.fullmatch(fingerprint)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.debug("SSD cache: the measured rates are unreadable and made anew: %s", error)
        return {}


def write(path: Path, found: Found) -> None:
    """Put these in the file, beside what other processes wrote there for other models. A failure is not worth a warning."""
    merged = read(path)
    for fingerprint, measured in found.items():
        merged.pop(fingerprint, None)
        merged[fingerprint] = measured
    kept = dict(list(merged.items())[-MAX_MODELS:])
    data = json.dumps({"version": 1, "models": {k: {"chunks": _short(c), "restores": _short(r)} for k, (c, r) in kept.items()}}).encode()
    try:
        private_file.replace(path, data)
    except OSError as error:
        logger.debug("SSD cache: measured rates are not kept: %s", error)


def _short(rows: list[Any]) -> list[list[Any]]:
    return [[float(f"{x:.10g}") if isinstance(x, float) else x for x in row] for row in rows]


def _sound(model: Any) -> tuple[list[Chunk], list[Restored]]:
    chunks = [(o, n, float(s)) for o, n, s in model["chunks"] if _count(o) and _count(n) and n and _seconds(s)]
    restores = [(b, float(s), float(t)) for b, s, t in model["restores"] if _count(b) and b and _seconds(s) and _seconds(t)]
    return chunks, restores


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and LEAST <= value < 1e11
