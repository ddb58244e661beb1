"""Asking a running server what a prompt would find."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mlx_lm_hooks import PluginError

from ...prompts import Prompt
from ..terminal import usage

TIMEOUT = 120.0  # the first time the server loads a tokenizer


def ask(url: str, prompt: Prompt) -> dict[str, Any]:
    """The server's answer. Raises UsageError for an impossible address, PluginError when there is no answer."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        connection_class = {"http": HTTPConnection, "https": HTTPSConnection}[parts.scheme]
        host, port = parts.hostname, parts.port
    except (KeyError, ValueError):
        usage(f"{url!r} is not a server's address; write it like http://127.0.0.1:8080")
    if not host:
        usage(f"{url!r} is not a server's address; write it like http://127.0.0.1:8080")
    _, body = prompt.request()
    connection = connection_class(host, port, timeout=TIMEOUT)
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/admin/cache/probe", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, answer = response.status, response.read()
    except (OSError, HTTPException) as error:
        raise PluginError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()
    try:
        value = json.loads(answer)
    except ValueError:
        value = None
    if status == 400 and isinstance(value, dict):
        usage(f"the prompt: {value.get('error')}")
    if status != 200 or not isinstance(value, dict):
        why = value.get("error") if isinstance(value, dict) else "is it mlx_lm.server with --plugin tiered, with --admin-routes on?"
        raise PluginError(f"{url} answers {status}: {why}")
    return value
