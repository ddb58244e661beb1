"""Settings that commands take as the server does: from a flag, else the environment, else their default."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any

from ...settings import Settings, env_name, flag
from ..terminal import usage


def setting(args: argparse.Namespace, name: str) -> Any:
    """The value of one setting. Raises UsageError."""
    (field,) = (field for field in fields(Settings) if field.name == name)
    given = getattr(args, name)
    text = given if given is not None else os.environ.get(env_name(name), "").strip() or None
    try:
        return field.metadata["parse"](text) if text is not None else field.default
    except ValueError as error:
        usage(f"{flag(name) if given is not None else env_name(name)}: {error}")
