"""Plugin routes and the stop of a real server process."""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest
import witness
from support.models import ENDLESS
from support.server import Server, user

from mlx_lm_patches.access import is_local


@pytest.fixture(scope="module")
def plugin_path(tmp_path_factory):
    return witness.install(tmp_path_factory.mktemp("plugin") / "lib")


@pytest.fixture
def serve(plugin_path, tiny_llama, tmp_path):
    """A server with the witness; its record is `server.record`."""

    def start(*flags: str) -> Server:
        record = tmp_path / "events"
        env = {"PYTHONPATH": str(plugin_path), "WITNESS_LOG": str(record), "MLX_LM_PLUGINS": None}
        # Tests that run as a shell's background job have SIGINT ignored, and their servers would inherit that.
        code = "import signal, os, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        command = [sys.executable, "-c", code, "-m", "mlx_lm", "server"]
        server = Server(tiny_llama, tmp_path / "log", ["--plugin", "witness", *flags], command=command, env=env)
        server.record = record  # type: ignore[attr-defined]
        return server

    return start


def call(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    reply = connection.getresponse()
    return reply.status, reply.read(), dict(reply.getheaders())


def long_chat(server, out, tokens=600):
    def run():
        out.append(server.chat(user("Tell me about os."), max_tokens=tokens))

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 20
    while "Prompt processing progress" not in server.log():
        assert time.monotonic() < until
        time.sleep(0.02)
    return thread


@contextmanager
def begun(server, **options):
    """A request that would take minutes, being decoded."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with closing(connection):
        body = {"messages": user("Tell me."), "max_tokens": 1000000, "logit_bias": ENDLESS, **options}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        until = time.monotonic() + 20
        while "Prompt processing progress" not in server.log():
            assert time.monotonic() < until
            time.sleep(0.02)
        yield


def test_routes(serve):
    with serve() as server:
        status, body, headers = call(server, "GET", "/witness?a=1&a=2&b=x")
        assert (status, headers["Content-Type"], int(headers["Content-Length"])) == (200, "application/json", len(body))
        assert json.loads(body) == {"method": "GET", "query": {"a": ["1", "2"], "b": ["x"]}, "body": "", "local": True}
        assert json.loads(call(server, "POST", "/witness", b"data")[1])["body"] == "data"
        assert json.loads(call(server, "DELETE", "/witness")[1])["method"] == "DELETE"
        assert call(server, "DELETE", "/elsewhere")[0] == 501
        assert call(server, "GET", "/witness/broken")[0] == 500
        assert call(server, "GET", "/witness/")[0] == 404
        origin = {"Origin": "http://evil.example"}
        assert call(server, "GET", "/witness", **origin)[0] == 403
        assert call(server, "GET", "/witness/open", **origin)[0] == 200
        assert call(server, "GET", "/witness", Host="evil.example", Origin="http://evil.example")[0] == 403
        assert call(server, "GET", "/witness", Origin=f"http://127.0.0.1:{server.port}")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.putrequest("POST", "/witness")
        connection.putheader("Content-Length", str(1 << 30))
        connection.endheaders()
        assert connection.getresponse().status == 413
        assert call(server, "GET", "/health")[0] == 200
        server.chat(user("What is os?"), max_tokens=2)
        assert server.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_requests_finish_and_saves(serve, number):
    with serve() as server:
        replies: list = []
        thread = long_chat(server, replies)
        server.signal(number)
        time.sleep(0.2)
        status, body, headers = call(server, "POST", "/v1/chat/completions", json.dumps({"messages": user("hi")}))
        assert (status, headers["Retry-After"]) == (503, "10") and "stopping" in body.decode()
        assert call(server, "GET", "/health")[0] == 200
        assert server.process.wait(60) == 0
        thread.join()
    assert replies[0].completion_tokens == 600 and replies[0].finish_reason == "length"
    (shutdown,) = [e for e in witness.events(server.record) if e["event"] == "shutdown"]
    assert 20 < shutdown["timeout"] < 30 and shutdown["alive"]


def test_a_second_signal_exits_at_once(serve):
    with serve() as server:
        with begun(server):
            server.signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.running
            server.signal(signal.SIGINT)
            assert server.process.wait(5) == 128 + signal.SIGINT


@pytest.mark.parametrize("seed", [{}, {"seed": 1}], ids=["batch", "sequential"])
def test_a_stop_ends_in_time_and_says_so(serve, seed):
    with serve("--witness-timeout", "1.5") as server:
        with begun(server, **seed):
            started = time.monotonic()
            server.signal(signal.SIGTERM)
            assert server.process.wait(20) == 1
            assert time.monotonic() - started < 6
    assert server.log().count("with requests unfinished") == 1


def test_a_stop_that_loses_something_says_so(serve):
    with serve("--witness-save", "no") as server:
        server.signal(signal.SIGTERM)
        assert server.process.wait(30) == 1
    assert server.log().count("not all of the prompt cache could be saved") == 1


def test_an_ignored_interrupt_stays_ignored(plugin_path, tiny_llama, tmp_path):
    code = "import signal, os, sys; signal.signal(2, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ignoring = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(plugin_path), "MLX_LM_PLUGINS": "witness"}
    with Server(tiny_llama, tmp_path / "log", command=[*ignoring, "-m", "mlx_lm", "server"], env=env) as server:
        server.signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.healthy()
        assert server.terminate() == 0


def test_stops_never_abort(serve):
    """mlx frees things when its threads end; while the interpreter goes away that would abort the process."""
    for _ in range(3):
        with serve() as server:
            server.chat(user("What is os?"), max_tokens=2)
            assert server.terminate() == 0, server.log()


LOCAL = [
    ("127.0.0.1", None, None, True),
    ("127.0.0.1", None, "localhost:8080", True),
    ("::1", None, "[::1]:8080", True),
    ("::ffff:127.0.0.1", None, "127.0.0.1", True),
    ("192.168.1.5", None, "127.0.0.1", False),
    ("127.0.0.1", None, "attacker.example:8080", False),
    ("127.0.0.1", "http://attacker.example:8080", "attacker.example:8080", False),
    ("127.0.0.1", "http://localhost:8080", "localhost:8080", True),
    ("127.0.0.1", "http://localhost:3000", "localhost:8080", False),
    ("127.0.0.1", "null", "localhost:8080", False),
    ("127.0.0.1", None, "my.host:8080", True),
    ("not an address", None, "localhost", False),
    ("127.0.0.1", None, "[localhost", False),
    ("127.0.0.1", "http://[", "localhost:8080", False),
]


@pytest.mark.parametrize(("client", "origin", "host", "local"), LOCAL)
def test_who_is_local(client, origin, host, local):
    assert is_local(client, origin, host, "my.host") is local
