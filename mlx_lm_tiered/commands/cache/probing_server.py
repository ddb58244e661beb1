"""Asking a running server what a prompt would find."""

from __future__ import annotations

from typing import Any

from mlx_lm_hooks import PluginError

from ...prompts import Prompt
from ..asking import HINT, exchange
from ..terminal import usage

TIMEOUT = 120.0  # the first time the server loads a tokenizer


def ask(url: str, prompt: Prompt) -> dict[str, Any]:
    """The server's answer. Raises UsageError for an impossible address, PluginError when there is no answer."""
    _, body = prompt.request()
    status, value = exchange(url, "POST", "/admin/cache/probe", body, TIMEOUT)
    if status == 400 and value is not None:
        usage(f"the prompt: {value.get('error')}")
    if status != 200 or value is None:
        raise PluginError(f"{url} answers {status}: {HINT if value is None else value.get('error')}")
    return value
