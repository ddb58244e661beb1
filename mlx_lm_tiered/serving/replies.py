"""Answers of the routes."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm_hooks import Reply


def reply(status: int, value: dict[str, Any]) -> Reply:
    """JSON."""
    return Reply(status, json.dumps(value, indent=2).encode() + b"\n")
