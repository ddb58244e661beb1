"""The status page's parts by themselves: what is shown of hostile text, what happens to orders nobody takes."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from idle_engine import Engine
from mlx_lm.models.cache import KVCache
from mlx_lm_hooks import ModelSource, Request, Served

from mlx_lm_tiered.managing import Row
from mlx_lm_tiered.prefix.lookup import Lookup, Parting
from mlx_lm_tiered.prefix.orders import Busy, Orders
from mlx_lm_tiered.runtime import Runtime
from mlx_lm_tiered.served import NOTE
from mlx_lm_tiered.serving.page.actions import Actions
from mlx_lm_tiered.serving.page.page import Page
from mlx_lm_tiered.serving.page.render import Renderer
from mlx_lm_tiered.serving.page.state import figures
from mlx_lm_tiered.serving.page.words import seconds
from mlx_lm_tiered.serving.routes import routes
from mlx_lm_tiered.settings import Settings

EVIL = "<script>alert('x')</script>\"' onmouseover=x &amp;"


REPORT = {**Runtime(Settings()).report(), "paged": {"blocks": 10, "blocks_used": 4, "blocks_shared": 2, "waiting": 1}}


def running(**settings: Any) -> Runtime:
    runtime = Runtime(Settings(**settings))
    runtime.engine = Engine()
    return runtime


def test_what_others_wrote_is_shown_as_text():
    runtime = running()
    runtime.source = ModelSource(Path("/models") / EVIL.replace("/", ""))
    lookup = Lookup(9, 3, "ram", why=EVIL)
    runtime.requests.ended(Served(1.0, ended=2.0, finish=EVIL, notes={NOTE: lookup, "tiered_text": {"before": EVIL, "prompt": EVIL, "stored": EVIL}}))
    rows = [Row("ram", EVIL, EVIL, EVIL, 1, 1, 1.0, 1.0, False, EVIL)]
    runtime.manager.in_ram = lambda limit: (rows, 1)  # type: ignore[method-assign]
    text = Page(runtime).handle(Request("GET", "/tiered", {}, {}, b"", True)).body.decode()
    assert "<script>alert" not in text and "&lt;script&gt;alert(" in text
    assert "' onmouseover" not in text and '" onmouseover' not in text


def test_restores_and_the_pool_are_shown():
    runtime = running()
    runtime.storage = SimpleNamespace(restorer=SimpleNamespace(progress=lambda: [(300, 25, 100)]))  # type: ignore[assignment]
    found = figures(SimpleNamespace(report=lambda: REPORT, source=None, requests=runtime.requests, storage=runtime.storage))
    text = Renderer().sections(("now", "memory"), found)
    assert 'max="100" value="25"' in text["now"] and "25 B of 100 B" in text["now"]
    assert "40.0 %" in text["memory"] and "4 of 10 blocks, 2 shared, 1 requests wait" in re.sub(r"\s+", " ", text["memory"])


def test_text_is_kept_only_when_it_may_be_shown(tiny_llama):
    at = Parting(tiny_llama, [5, 6], [7], [8])
    for inspected in (False, True):
        runtime = running(cache_inspection=inspected)
        served = Served(1.0, ended=2.0, notes={NOTE: Lookup(9, 3, "ram", parting=at)})
        runtime.requests.ended(served)
        Page(runtime).handle(Request("GET", "/tiered", {}, {}, b"", True))
        assert ("tiered_text" in served.notes) is inspected
        assert runtime.prefix_cache(None, None, "server").inspected is inspected


def test_orders_that_nobody_takes_are_not_done_later():
    orders, done = Orders(lambda: None), []
    with pytest.raises(Busy):
        orders.do(lambda: done.append(1), 0.05)
    assert orders.turn() and done == [] and not orders.turn()
    answer: list[int] = []
    asking = threading.Thread(target=lambda: answer.append(orders.do(lambda: 7, 10)))
    asking.start()
    while not orders.turn():
        pass
    asking.join(10)
    assert answer == [7]


def test_an_entry_is_demoted_and_deleted_by_its_number(tmp_path):
    def cache() -> list[KVCache]:
        one = KVCache()
        one.update_and_fetch(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 1, 4, 8)))
        return [one]

    runtime = running()
    prefixes = runtime.prefix_cache(None, None, "server")
    for first in (1, 2):
        prefixes.put(ModelSource(tmp_path / "m"), [first, 2, 3, 4], cache())
    runtime.manager._orders.do = lambda work, timeout: work()  # type: ignore[method-assign]
    rows, total = runtime.manager.in_ram(1)
    assert total == 2 and [(row.tokens, row.model, row.durable) for row in rows] == [(4, "m", False)]
    actions = Actions(runtime, Page(runtime))

    def press(name: str, form: str) -> tuple[int, str]:
        request = Request("POST", f"/tiered/{name}", {}, {"content-type": "application/x-www-form-urlencoded"}, form.encode(), True)
        reply = actions.handler(name)(request)
        return reply.status, reply.body.decode()

    number = rows[0].name
    status, text = press("demote", f"entry={number}&confirmed=yes")
    assert status == 409 and "no SSD tier" in text
    assert press("delete", f"tier=ram&entry={number}&confirmed=yes")[0] == 200
    assert press("delete", f"tier=ram&entry={number}&confirmed=yes")[0] == 404
    assert press("flush", "confirmed=yes")[0] == 409
    assert press("clear", "confirmed=yes")[0] == 200 and runtime.manager.in_ram(9) == ([], 0)


def test_with_routes_for_all_another_page_still_presses_no_button():
    runtime = running(admin_routes="all")
    actions = Actions(runtime, Page(runtime))
    form = {"Content-Type": "application/x-www-form-urlencoded", "Host": "box:8080"}

    def press(local: bool, **headers: str) -> int:
        return actions.handler("clear")(Request("POST", "/tiered/clear", {}, {**form, **headers}, b"", local)).status

    assert press(False, Origin="http://box:8080") == 200  # and asks
    assert press(False, Origin="http://evil.example") == 403
    assert press(False) == 403 and press(True) == 200


def test_the_page_can_be_switched_off():
    def paths(**settings: Any) -> set[str]:
        return {route.path for route in routes(running(**settings))}

    assert "/tiered" in paths()
    assert not any(path.startswith("/tiered") for path in paths(status_page=False) | paths(admin_routes="off"))


@pytest.mark.parametrize(("value", "text"), [(None, "—"), (0.0004, "0 ms"), (0.25, "250 ms"), (3.25, "3.2 s"), (42, "42 s"), (100, "2 min"), (7200, "2 h"), (200_000, "2 d")])
def test_times_as_people_say_them(value, text):
    assert seconds(value) == text
