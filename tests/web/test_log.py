"""Lines about requests are bounded, and who looks every second leaves none."""

from __future__ import annotations

import logging

from support.server import tiered, user

from mlx_lm_tiered.prefix.lookup import Lookup
from mlx_lm_tiered.prefix.telling import MOST, WINDOW, Telling


def test_many_requests_are_one_line_together(caplog):
    caplog.set_level(logging.INFO, "mlx_lm_tiered")
    now = [100.0]
    telling = Telling(lambda: now[0])
    for _ in range(MOST):
        telling.tell(Lookup(10, 5, "ram", why="the rest is new"))
    assert len(caplog.messages) == MOST and caplog.messages[0] == "reused 5 of 10 prompt tokens from RAM; the rest is new"
    for reused in (0, 4, 4):
        telling.tell(Lookup(10, reused, "ram" if reused else ""))
    telling.turn()
    assert len(caplog.messages) == MOST
    now[0] += WINDOW
    telling.turn()
    assert caplog.messages[MOST:] == ["3 more requests, 2 of which reused something: 8 of 30 prompt tokens"]
    telling.tell(Lookup(10, 3, "ssd", restore_seconds=0.25))
    telling.turn()
    assert caplog.messages[MOST + 1 :] == ["reused 3 of 10 prompt tokens from SSD in 250 ms"]


def test_a_server_says_where_its_page_is_and_not_who_looks(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        server.chat(user("Tell me"), max_tokens=2)
        for path in ("/stats", "/metrics", "/tiered", "/tiered/state", "/tiered/style.css"):
            assert server.request("GET", path)[0] == 200
        assert server.request("GET", "/stats", headers={"Origin": "http://evil.example"})[0] == 403
        assert server.request("POST", "/tiered/flush", b"confirmed=yes", {"Content-Type": "application/x-www-form-urlencoded"})[0] == 200
        log = server.log()
    assert f"status page at {server.url}/tiered" in log
    assert '"GET /tiered' not in log and '"GET /metrics' not in log
    assert log.count('"GET /stats HTTP/1.1" 403') == 1 and log.count('"GET /stats') == 1
    assert '"POST /tiered/flush HTTP/1.1" 200' in log and '"POST /v1/chat/completions HTTP/1.1" 200' in log
    assert log.count("prompt tokens") == 1
