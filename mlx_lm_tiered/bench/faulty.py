"""An HTTP proxy before a store that fails as networks do: some replies are dropped, cut off or corrupted, by a seeded choice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("dropped", "cut", "corrupted")


class Proxy:
    """Forwards to 127.0.0.1:`target`. `share` of the replies fail, one way as often as another; `delay` is what each waits for, in seconds. Both may be changed."""

    def __init__(self, target: int, share: float = 0.0, seed: int = 0):
        self.share = share
        self.delay = 0.0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # header and body are two writes

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # the client went
                    self.close_connection = True

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                upstream = HTTPConnection("127.0.0.1", target, timeout=60)
                try:
                    upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        if name.lower() not in ("connection", "transfer-encoding"):
                            upstream.putheader(name, value)
                    upstream.endheaders(body or None)
                    reply = upstream.getresponse()
                    data = reply.read()
                except (OSError, HTTPException):
                    self.close_connection = True
                    return
                finally:
                    upstream.close()
                time.sleep(proxy.delay)
                fault = proxy._fault()
                if fault == "dropped":
                    self.close_connection = True
                    return
                self.send_response_only(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = reply.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length)
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
                if fault == "corrupted" and data:
                    at = proxy._place(len(data))
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_MKCOL = do_PROPFIND = do_POST = forward

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def counts(self) -> dict[str, int]:
        """Replies so far, and those that failed, by how."""
        with self._lock:
            return {name: self._counts[name] for name in ("replies", *FAULTS)}

    def _fault(self) -> str | None:
        with self._lock:
            self._counts["replies"] += 1
            if self._random.random() >= self.share:
                return None
            fault = self._random.choice(FAULTS)
            self._counts[fault] += 1
            return fault

    def _place(self, length: int) -> int:
        with self._lock:
            return self._random.randrange(length)


@contextmanager
def faulty(target: int, share: float = 0.0, seed: int = 0) -> Iterator[Proxy]:
    """A proxy while it is needed."""
    proxy = Proxy(target, share, seed)
    thread = threading.Thread(target=proxy._server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy._server.shutdown()
        proxy._server.server_close()
        thread.join()
