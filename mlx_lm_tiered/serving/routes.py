"""HTTP routes: ``GET /stats`` and ``POST /admin/cache/flush``."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm_hooks import Reply, Request, Route

from ..runtime import Runtime

# A flush waits for running requests; a client that cannot wait as long says so.
FLUSH_TIMEOUT = 600.0


def routes(runtime: Runtime) -> list[Route]:
    """The routes of this run, for those `--admin-routes` allows."""
    access = runtime.settings.admin_routes
    if access == "off":
        return []

    def stats(request: Request) -> Reply:
        return _json(200, runtime.report())

    def flush(request: Request) -> Reply:
        timeout = FLUSH_TIMEOUT
        if "timeout" in request.query:
            try:
                timeout = float(request.query["timeout"][0])
            except ValueError:
                return _json(400, {"error": "timeout must be a number of seconds"})
        report = runtime.flush(timeout)
        return _json(200 if report["durable"] else 503, report)

    return [Route("GET", "/stats", stats, access), Route("POST", "/admin/cache/flush", flush, access)]


def _json(status: int, value: dict[str, Any]) -> Reply:
    return Reply(status, json.dumps(value, indent=2).encode() + b"\n")
