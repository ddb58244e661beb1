"""The port of a test's or a bench's server is its own, though it listens only seconds after it was chosen."""

from __future__ import annotations

import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_lm_tiered.bench.server import reserved_port

CHOICES = 60_000  # more than there are ports to choose from


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be held for another process")
def test_nobody_else_is_given_a_reserved_port_and_its_server_can_listen_there():
    with reserved_port() as held:
        port = held.getsockname()[1]
        for _ in range(CHOICES):
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] != port
        with ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler) as server:  # as upstream's server does
            assert server.server_port == port
            with pytest.raises(OSError):
                ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler)
