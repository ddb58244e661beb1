"""Seam: plugin routes on the server, and a stop that waits for requests and saves."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mlx_lm_hooks.types import Refused, Reply, Request, Route

from .. import usage
from ..access import is_local
from ..clients import Client
from ..engine import ENGINE
from ..runtime import Runtime
from ..seam import Seam
from ..shortage import RETRY_AFTER_SECONDS
from ..stopping import Stopping

log = logging.getLogger("mlx_lm_patches")

COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
LARGEST_BODY = 16 << 20
# Where upstream answers, too, whatever a plugin adds there.
UPSTREAM = ("/v1/", "/chat/", "/health")


def build(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def _run_http_server(*args: Any, **kwargs: Any) -> Any:
        if not runtime.active:
            return original(*args, **kwargs)
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        stopping = Stopping(runtime.plugins.shutdown_timeout(), runtime.plugins.shutdown)
        runtime.stops_by(stopping)
        options["handler_class"] = handler(options["handler_class"], runtime.plugins.routes(), stopping, runtime, options["host"])
        options["server_class"] = server(options["server_class"], stopping)
        with stopping.signals():
            result = original(*call.args, **call.kwargs)
        if stopping.requested:
            generator = options["response_generator"]
            engine = getattr(generator, ENGINE, None)
            stopping.end(generator, generator.stop_and_join if engine is None else engine.end, runtime.plugins.unconfigure)
        return result

    return _run_http_server


def server(base: type, stopping: Stopping) -> type:
    """The server class, which tells `stopping` of its instance."""

    class Server(base):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            stopping.bound(self)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            with stopping.handling():
                super().process_request_thread(request, client_address)

        def handle_error(self, request: Any, client_address: Any) -> None:
            if isinstance(error := sys.exc_info()[1], ConnectionError):
                log.debug("the client %s has gone: %s", client_address, error)
            else:
                super().handle_error(request, client_address)

    return Server


def handler(base: type, routes: list[Route], stopping: Stopping, runtime: Runtime, host: str) -> type:
    """The handler class with the plugins' routes, and with admission to completions."""
    table = {(route.method.upper(), route.path): route for route in routes}
    allowed: dict[str, list[str]] = {}
    for method, path in table:
        allowed.setdefault(path, []).append(method)

    class Handler(base):
        def plugin_route(self) -> bool:
            """Answer if the request is for a route. False when it is not."""
            url = urlsplit(self.path)
            route = table.get((self.command, url.path)) if runtime.active else None
            if route is None:
                if not runtime.active or url.path not in allowed or url.path.startswith(UPSTREAM) or self.command == "OPTIONS":
                    return False
                methods = " or ".join(sorted(allowed[url.path]))
                self.plugin_reply(_error(405, f"{url.path} answers {methods} only"), Allow=methods.replace(" or ", ", "))
                return True
            local = is_local(self.client_address[0], self.headers.get("Origin"), self.headers.get("Host"), host)
            if route.access == "local" and not local:
                self.plugin_reply(_error(403, "only for clients on this machine"))
                return True
            self.plugin_read_only = self.command == "GET"
            body = self.plugin_body()
            if body is None:
                self.plugin_reply(_error(413, f"the body must have a length of at most {LARGEST_BODY} bytes"))
                return True
            request = Request(self.command, url.path, parse_qs(url.query), dict(self.headers.items()), body, local)
            try:
                reply = route.handler(request)
            except Exception as error:
                runtime.fault(f"the route {route.path}", error)
                reply = _error(500, f"{type(error).__name__}: {error}")
            self.plugin_reply(reply)
            return True

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            # Who looks every second must not fill the log.
            if not (getattr(self, "plugin_read_only", False) and code == 200):
                super().log_request(code, size)

        def plugin_body(self) -> bytes | None:
            try:
                length = int(self.headers.get("Content-Length") or 0)
            except ValueError:
                return None
            return self.rfile.read(length) if 0 <= length <= LARGEST_BODY else None

        def plugin_reply(self, reply: Reply, **headers: str) -> None:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            body = reply.body
            if isinstance(body, bytes):
                self.send_header("Content-Length", str(len(body)))
            for name, value in [*reply.headers.items(), *headers.items()]:
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if isinstance(body, bytes):
                self.wfile.write(body)
                self.wfile.flush()
            else:
                self.plugin_stream(body)

        def plugin_stream(self, parts: Generator[bytes, None, None]) -> None:
            """Send what comes, as it comes: without a length the end of the connection ends the body."""
            self.close_connection = True
            with closing(parts):
                for part in parts:
                    self.wfile.write(part)
                    self.wfile.flush()
                    if stopping.requested or not runtime.active:
                        break

        def do_POST(self) -> None:
            if self.plugin_route():
                return
            if self.path not in COMPLETIONS:
                super().do_POST()
                return
            if not stopping.enter():
                self.plugin_reply(_error(503, "the server is stopping"), Retry_After=str(RETRY_AFTER_SECONDS))
                return
            client = Client(self.connection, runtime)
            runtime.here.client = client
            try:
                super().do_POST()
            except ConnectionError:
                raise
            except Exception as error:
                self.plugin_failed(error)
            finally:
                runtime.here.client = None
                client.leave()
                stopping.leave()

        def plugin_failed(self, error: Exception) -> None:
            """Answer an error that came in the middle of an answer: with a status while nothing was sent, else with an event, then the end."""
            log.warning("a request failed: %s: %s", type(error).__name__, error)
            self.close_connection = True
            if not getattr(self, "plugin_sent", False):
                self._headers_buffer: list[bytes] = []  # upstream's 200, which waits for the body
                status, text = _status(error)
                self.plugin_reply(_error(status, text), **_retry(error))
            elif self.stream:
                self.wfile.write(f"data: {json.dumps({'error': {'message': str(error), 'code': _code(error)}})}\n\n".encode())
                self.wfile.flush()

        def _set_completion_headers(self, status_code: int = 200) -> None:
            # Upstream answers 404 to whatever ends a request before its first answer.
            refused = sys.exc_info()[1] if status_code == 404 else None
            if not isinstance(refused, Refused):
                super()._set_completion_headers(status_code)
                return
            super()._set_completion_headers(refused.status)
            for name, value in _retry(refused).items():
                self.send_header(name.replace("_", "-"), value)

        def flush_headers(self) -> None:
            self.plugin_sent = True
            super().flush_headers()

        def do_GET(self) -> None:
            if not self.plugin_route():
                super().do_GET()

    for method in {method for method, _ in table} - {"GET", "POST"}:
        setattr(Handler, f"do_{method}", _other(method, base))
    return Handler if runtime.speculation is None else usage.handler(Handler, runtime)


def _other(method: str, base: type) -> Callable[[Any], None]:
    """A method that upstream's handler does not answer, or answers alike for every path."""

    def respond(self: Any) -> None:
        if self.plugin_route():
            return
        upstream = getattr(base, f"do_{method}", None)
        if upstream is not None:
            upstream(self)
        else:
            self.send_error(501, f"Unsupported method ({method!r})")

    return respond


def _status(error: Exception) -> tuple[int, str]:
    """The status and the text for an error of which nothing else is known than that it ended a request."""
    if isinstance(error, Refused):
        return error.status, str(error)
    return 400 if isinstance(error, ValueError) else 500, f"{type(error).__name__}: {error}"


def _code(error: Exception) -> int:
    """The code for an error in the middle of a stream, which did not come from what the client asked."""
    return error.status if isinstance(error, Refused) else 500


def _retry(error: Exception) -> dict[str, str]:
    seconds = error.retry_after if isinstance(error, Refused) else None
    return {} if seconds is None else {"Retry_After": str(seconds)}


def _error(status: int, message: str) -> Reply:
    return Reply(status, json.dumps({"error": message}).encode())


SEAMS = [
    Seam(
        feature="http",
        module="mlx_lm.server",
        qualname="_run_http_server",
        kind="wrap",
        signature="(host, port, response_generator, server_class=, handler_class=)",
        bodies={"4029aac3c12a878a": "0.32.0 0.32.1 0.32.2"},
        why="adds the plugins' routes and a stop that drains and saves",
        until="upstream has routes, handles SIGTERM and drains",
        build=build,
    ),
    Seam(
        feature="http",
        module="mlx_lm.server",
        qualname="APIHandler.do_POST",
        kind="check",
        signature="(self)",
        bodies={"1402933d387d3dc1": "0.32.0", "101fe52514545e12": "0.32.1 0.32.2"},
        why="answers completions at the paths that are admitted and counted",
        until="upstream has routes, handles SIGTERM and drains",
    ),
    Seam(
        feature="http",
        module="mlx_lm.server",
        qualname="APIHandler.do_GET",
        kind="check",
        signature="(self)",
        bodies={"7035dc739bed4a23": "0.32.0 0.32.1 0.32.2"},
        why="is asked only for paths that no plugin has",
        until="upstream has routes, handles SIGTERM and drains",
    ),
]
