"""Clients that go away while real servers work for them (fault 13), and requests that cannot be served (fault 11)."""

from __future__ import annotations

import json
import socket
import time

import pytest

from support.models import ENDLESS, document
from support.server import RequestFailed, tiered
from support.waiting import until

LONG = document(7_000)
SOON = 3.0  # seconds; it takes half a second on a quiet machine


@pytest.fixture(scope="module")
def server(tiny_llama, tmp_path_factory):
    home = tmp_path_factory.mktemp("clients")
    # Small steps, so that a prefill has many points at which it can be ended.
    with tiered(tiny_llama, home / "cold", "--prefill-step-size", "8", log=home / "log") as server:
        deadline = time.monotonic() + 60
        while server.flush()[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield server


def send(server, **body) -> socket.socket:
    """A request whose answer nobody has read yet."""
    data = json.dumps({"temperature": 0.0} | body).encode()
    connection = socket.create_connection((server.host, server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def idle_within(server, seconds: float) -> bool:
    """Whether no request is served any more: only then is a flush answered."""
    started = time.monotonic()
    server.flush()
    return time.monotonic() - started < seconds


def lookups(server) -> int:
    return server.stats()["lookups"]


@pytest.mark.parametrize(("seed", "stream"), [(None, False), (None, True), (7, False)], ids=["batch", "batch-streamed", "sequential"])
def test_a_prefill_ends_and_what_it_did_is_reused(server, seed, stream):
    prompt = f"{seed} {stream} " + LONG
    extra = {} if seed is None else {"seed": seed}
    before = lookups(server)
    connection = send(server, prompt=prompt, max_tokens=4, stream=stream, **extra)
    until(lambda: lookups(server) > before)
    time.sleep(0.3)
    connection.close()
    assert idle_within(server, SOON)
    again = server.complete(prompt, max_tokens=4, tokens=True, **extra)
    assert 20 < again.cached_tokens < again.prompt_tokens - 100  # neither nothing nor all of it had been computed
    assert server.healthy() and "Traceback" not in server.log()


@pytest.mark.parametrize(("seed", "stream"), [(None, False), (7, False), (7, True)], ids=["batch", "sequential", "sequential-streamed"])
def test_a_decode_ends(server, seed, stream):
    extra = {} if seed is None else {"seed": seed}
    before = lookups(server)
    connection = send(server, prompt="A story", max_tokens=100_000, stream=stream, logit_bias=ENDLESS, **extra)
    until(lambda: lookups(server) > before)
    time.sleep(0.3)
    connection.close()
    assert idle_within(server, SOON)
    assert "Traceback" not in server.log()


def test_one_that_waits_for_another_is_never_begun(server):
    """A sequential request waits until the batch has drained; by then its client has gone."""
    before = lookups(server)
    first = send(server, prompt="A story", max_tokens=100_000, logit_bias=ENDLESS)
    until(lambda: lookups(server) > before)
    second = send(server, prompt="Another " + LONG, max_tokens=100_000, seed=3, logit_bias=ENDLESS)
    time.sleep(0.7)
    second.close()
    time.sleep(0.7)
    first.close()
    assert idle_within(server, SOON)


def test_a_client_that_stays_is_answered(server):
    connection = send(server, prompt="A story", max_tokens=600, logit_bias=ENDLESS)
    answer = b""
    while b'"usage"' not in answer:
        assert (data := connection.recv(1 << 16)), answer
        answer += data
    assert b'"completion_tokens": 600' in answer
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "status"), [({"prompt": ""}, 400), ({"prompt": "x", "stop": [5]}, 404)], ids=["empty prompt", "stop words"])
def test_a_request_that_cannot_be_served_gets_an_error_and_others_go_on(server, wrong, status, stream):
    before = lookups(server)
    other = send(server, prompt="A story", max_tokens=100_000, logit_bias=ENDLESS)
    until(lambda: lookups(server) > before)
    with pytest.raises(RequestFailed) as failed:
        server.complete(wrong["prompt"], stream=stream, max_tokens=4, **{"stop": wrong.get("stop", [])})
    assert stream or failed.value.status == status
    assert server.healthy()
    other.setblocking(False)
    with pytest.raises(BlockingIOError):  # still being decoded
        other.recv(1)
    other.close()  # before anything may fail: the server would wait for it
    assert idle_within(server, SOON)
