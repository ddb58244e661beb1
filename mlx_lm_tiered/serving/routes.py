"""HTTP routes: ``GET /stats`` and ``/metrics``, ``POST /admin/cache/flush``, ``/admin/cache/probe`` and ``/admin/drain``, the status page."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mlx_lm_hooks import Reply, Request, Route

from ..runtime import Runtime
from ..settings import parse_seconds
from .metrics import Exporter
from .probe import Prober
from .replies import reply as _json

logger = logging.getLogger("mlx_lm_tiered")

# A flush waits for running requests; a client that cannot wait as long says so.
FLUSH_TIMEOUT = 600.0


def routes(runtime: Runtime) -> list[Route]:
    """The routes of this run, for those `--admin-routes` allows."""
    access = runtime.settings.admin_routes
    metrics = runtime.settings.metrics or access
    return [*_administration(runtime, access), *_page(runtime, access), *([Route("GET", "/metrics", Exporter(runtime).handle, metrics)] if metrics != "off" else [])]


def _page(runtime: Runtime, access: str) -> list[Route]:
    if access == "off" or not runtime.settings.status_page:
        return []
    from .page.actions import Actions
    from .page.page import Page
    from .page.render import STATIC

    if (url := _url(runtime)) is not None:
        logger.info("status page at %s/tiered", url)
    page = Page(runtime)
    actions = Actions(runtime, page)
    return [
        Route("GET", "/tiered", page.handle, access),
        Route("GET", "/tiered/state", page.state, access),
        Route("GET", "/tiered/events", page.events, access),
        *(Route("GET", f"/tiered/{name}", page.static, access) for name in STATIC),
        *(Route("POST", f"/tiered/{name}", actions.handler(name), access) for name in actions.table),
    ]


def _url(runtime: Runtime) -> str | None:
    """Where this machine reaches the server; None when that is not known before it listens."""
    host, port = getattr(runtime.args, "host", None), getattr(runtime.args, "port", None)
    if host is None or not port:
        return None
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _administration(runtime: Runtime, access: str) -> list[Route]:
    if access == "off":
        return []

    def stats(request: Request) -> Reply:
        return _json(200, runtime.report())

    def bounded(action: Callable[[float], dict[str, Any]], done: Callable[[dict[str, Any]], bool]) -> Callable[[Request], Reply]:
        def handler(request: Request) -> Reply:
            timeout = FLUSH_TIMEOUT
            if "timeout" in request.query:
                try:
                    timeout = parse_seconds(request.query["timeout"][0])
                except ValueError as error:
                    return _json(400, {"error": f"timeout: {error}"})
            report = action(timeout)
            return _json(200 if done(report) else 503, report)

        return handler

    flush = bounded(runtime.flush, lambda report: report["durable"])
    drain = bounded(runtime.drain, lambda report: report["durable"] and report["left"] == 0)
    return [
        Route("GET", "/stats", stats, access),
        Route("POST", "/admin/cache/flush", flush, access),
        Route("POST", "/admin/drain", drain, access),
        Route("POST", "/admin/cache/probe", Prober(runtime).handle, access),
    ]
