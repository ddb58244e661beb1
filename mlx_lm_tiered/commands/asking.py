"""Asking a running server."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from mlx_lm_hooks import PluginError

from .terminal import usage

HINT = "is it mlx_lm.server with --plugin tiered, with --admin-routes on?"


def exchange(url: str, method: str, path: str, body: Any = None, timeout: float = 10.0) -> tuple[int, dict[str, Any] | None]:
    """Status and JSON object of an answer (None: it is something else). Raises UsageError for an impossible address, PluginError when there is no answer."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        connection_class = {"http": HTTPConnection, "https": HTTPSConnection}[parts.scheme]
        host, port = parts.hostname, parts.port
    except (KeyError, ValueError):
        usage(f"{url!r} is not a server's address; write it like http://127.0.0.1:8080")
    if not host:
        usage(f"{url!r} is not a server's address; write it like http://127.0.0.1:8080")
    connection = connection_class(host, port, timeout=timeout)
    sent = (json.dumps(body), {"Content-Type": "application/json"}) if body is not None else (None, {})
    try:
        connection.request(method, parts.path.rstrip("/") + path, *sent)
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
    return status, value if isinstance(value, dict) else None
