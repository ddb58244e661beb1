"""The status page in a real browser, against a real server that serves requests meanwhile."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from typing import Any

import pytest
from browser import FOUND, MISSING, chromium, picture, violations
from support.models import ENDLESS, document
from support.server import tiered

TEXT = document(2500)
LONG = document(120_000)

browsing = pytest.mark.skipif(FOUND is None, reason=MISSING)


@pytest.fixture(scope="module")
def server(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    flags = ("--speculation", "ngram", "--cache-inspection", "--prefill-step-size", "64", "--ssd-demote-idle", "0")
    with tiered(tiny_llama, folder / "cold", *flags, log=folder / "log") as server:
        server.complete(TEXT + TEXT[:200], max_tokens=20)
        server.complete(TEXT + TEXT[:200], max_tokens=20)
        server.complete(TEXT[:900] + " <script>zebra()</script> " + TEXT[900:], max_tokens=5)
        assert server.flush()[0] == 200
        yield server
        assert server.stats()["faults"] == {}


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(server, browser):
    """The page, open and live. It asks no one but the server, and its script does not fail."""
    with opened(server, browser) as found:
        yield found


@contextmanager
def opened(server, browser, **options: Any):
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    errors: list[str] = []
    asked: list[str] = []
    with closing(context):
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{server.url}/tiered")
        if options.get("java_script_enabled", True):
            page.get_by_text("live", exact=True).wait_for()
        yield page
    assert errors == []
    assert [url for url in asked if not url.startswith((server.url, "data:"))] == []


@contextmanager
def load(server, prompt: str = "Tell me", tokens: int = 1_000_000):
    """A request that decodes until the end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(connection):
        body = {"prompt": prompt, "max_tokens": tokens, "logit_bias": ENDLESS, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        yield
    until(lambda: server.stats()["requests"]["running"] == 0)


def until(ready: Callable[[], Any], timeout: float = 60.0) -> Any:
    end = time.monotonic() + timeout
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def state(server) -> dict[str, Any]:
    """Once it is no older than what `/stats` says of RAM."""

    def fresh() -> dict[str, Any] | None:
        status, body = server.request("GET", "/tiered/state")
        assert status == 200
        found, stats = json.loads(body), server.stats()
        same = found["ram"]["total"] == stats["ram"]["entries"] and found["report"]["puts"] == stats["puts"]
        return found if same and found["disk"]["total"] == stats["ssd"]["entries"] else None

    return until(fresh)


def post(server, name: str, body: str | bytes = "", **headers: str) -> tuple[int, str]:
    """As a program does; the page's own headers are for the tests to set."""
    form = {"Content-Type": "application/x-www-form-urlencoded", **{name.replace("_", "-"): value for name, value in headers.items()}}
    status, answer = server.request("POST", f"/tiered/{name}", body if isinstance(body, bytes) else body.encode(), form)
    return status, answer.decode()


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def confirm(page, button: str = "yes") -> str:
    """Answer the question; what the page says then."""
    page.locator("dialog").wait_for()
    page.evaluate("document.getElementById('result').textContent = ''")
    page.locator(f'dialog button[value="{button}"]').click()
    return said(page) if button == "yes" else ""


def said(page) -> str:
    found = page.locator("#result")
    return until(lambda: text if (text := found.inner_text()) != "Working…" else "")


# In the browser


@browsing
def test_its_figures_are_those_of_the_statistics(server, page):
    time.sleep(1.2)  # so that it has looked since the last request
    page.get_by_role("button", name="Pause updates").click()
    stats = server.stats()
    ssd = stats["ssd"]
    expected = {
        "ram": (stats["ram"]["entries"], stats["hits_by_tier"]["ram"], stats["tokens_saved_by_tier"]["ram"]),
        "queue": (ssd["pending"], stats["hits_by_tier"]["queue"], stats["tokens_saved_by_tier"]["queue"]),
        "ssd": (ssd["entries"], stats["hits_by_tier"]["ssd"], stats["tokens_saved_by_tier"]["ssd"]),
    }
    for tier, (entries, hits, tokens) in expected.items():
        cells = page.locator(f'tr[data-tier="{tier}"] td').all_inner_texts()
        assert (number(cells[0]), number(cells[2]), number(cells[4])) == (entries, hits, tokens)
        assert number(cells[3]) == pytest.approx(100 * hits / stats["lookups"], abs=0.05)
    tiles = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dt + dd").all_inner_texts(), strict=True))
    assert number(tiles["Prompt tokens reused"]) == pytest.approx(100 * stats["tokens_saved"] / stats["prompt_tokens"], abs=0.05)
    assert number(tiles["Written"]) == ssd["written"] > 0
    assert number(tiles["Accepted"]) == pytest.approx(100 * stats["speculation"]["acceptance"], abs=0.05)
    rows = page.locator('[data-section="requests"] tbody tr')
    assert rows.count() == stats["lookups"] == 3
    diverged = rows.nth(0).locator("td")
    assert diverged.nth(3).inner_text() == "RAM" and "diverges at token" in diverged.nth(9).inner_text()
    assert number(diverged.nth(2).inner_text()) == stats["tokens_saved"] - number(rows.nth(1).locator("td").nth(2).inner_text())
    assert "<script>zebra" in diverged.nth(9).inner_text()  # the text around, as text
    page.evaluate("document.querySelector('[data-section=disk] p code').textContent = '~/.cache/kv'")
    picture(page, "status-page.png", full_page=True)


@browsing
def test_progress_moves(server, page):
    def seen(server, prompt: str, phase: str, cell: int) -> set[str]:
        """Three values of a cell of the request that runs."""
        found: set[str] = set()
        row = f'[data-section="now"] tr[data-phase="{phase}"]'
        with load(server, prompt=prompt):

            def three() -> bool:
                found.update(cells[cell] for cells in [page.locator(f"{row} td").all_inner_texts()] if len(cells) > cell)
                return len(found) >= 3

            until(three, 60)
            picture(page, f"status-page-{phase}.png")
        return found

    assert all("of" in text for text in seen(server, LONG, "prefill", 4))
    assert all(number(text) > 0 for text in seen(server, "Tell me", "decoding", 5))
    page.get_by_text("No request runs.").wait_for()
    assert until(lambda: server.stats()["requests"]["finished"]["abort"]) == 2  # both were given up by their client


@browsing
def test_buttons_do_what_they_say_while_requests_run(server, page):
    assert server.flush()[0] == 200
    with load(server):
        before = state(server)
        name = next(row["name"] for row in before["ram"]["rows"] if row["durable"])
        page.get_by_role("button", name=f"Demote entry {name}").click()
        confirm(page, "no")
        assert [row["name"] for row in state(server)["ram"]["rows"]].count(name) == 1  # not confirmed
        page.get_by_role("button", name=f"Demote entry {name}").click()
        assert confirm(page) == f"Entry {name} has left RAM."
        assert name not in [row["name"] for row in state(server)["ram"]["rows"]]
        assert server.stats()["demotions"] == 1 and state(server)["disk"]["total"] == before["disk"]["total"]
        page.locator(f'form[data-question*="entry {name} "]').first.wait_for(state="detached")
        one = state(server)["ram"]["rows"][0]["name"]
        page.get_by_role("button", name=f"Delete entry {one} in RAM").click()
        assert confirm(page) == f"Entry {one} was deleted in RAM."
        until(lambda: server.stats()["ram"]["entries"] == before["ram"]["total"] - 2)
        files = state(server)["disk"]["rows"]
        file = next(row for row in files if row["continued"] == 0)["name"].split("/")[1]
        page.get_by_role("button", name=f"Delete entry {file[:8]} on disk").click()
        assert confirm(page) == "Deleted on disk: 1 files."
        until(lambda: server.stats()["ssd"]["entries"] == len(files) - 1)
    server.complete(TEXT, max_tokens=3)
    page.get_by_role("button", name="Write all to disk").click()
    assert confirm(page).startswith("Everything is on disk")
    assert server.stats()["ssd"]["undurable"] == 0
    page.get_by_role("button", name="Clear all tiers").click()
    assert confirm(page).startswith("Cleared:")
    stats = server.stats()
    assert stats["ram"]["entries"] == stats["ssd"]["entries"] == 0
    assert server.complete(TEXT, max_tokens=3).cached_tokens == 0


@browsing
def test_the_keyboard_is_enough(server, page):
    server.complete(TEXT, max_tokens=3)
    assert server.flush()[0] == 200
    name = next(row["name"] for row in state(server)["ram"]["rows"] if row["durable"])
    page.get_by_role("button", name=f"Demote entry {name}").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    page.keyboard.press("Enter")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Demote entry {name}":
            break
    page.keyboard.press("Enter")
    page.locator("dialog").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Cancel"  # what Enter would do at once changes nothing
    time.sleep(2.5)  # figures come meanwhile
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Demote entry {name}"
    page.keyboard.press("Enter")
    page.locator("dialog").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert said(page) == f"Entry {name} has left RAM."
    assert page.evaluate("document.activeElement.id") == "ram"


@browsing
def test_those_who_do_not_see_or_point_can_use_it(server, browser):
    for options in ({"color_scheme": "light"}, {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}):
        with opened(server, browser, **options) as page:
            assert violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= options.get("viewport", {"width": 1280})["width"]
            picture(page, f"status-page-{options['color_scheme']}.png")
            page.get_by_role("button", name="Clear all tiers").click()
            assert violations(page) == []


@browsing
def test_it_can_be_read_and_used_without_javascript(server, browser):
    server.complete(TEXT, max_tokens=3)
    state(server)
    with opened(server, browser, java_script_enabled=False) as page:
        assert page.locator("tr[data-tier]").count() == 3
        entries = state(server)["ram"]["total"]
        page.get_by_role("button", name=re.compile(r"Delete entry \d+ in RAM")).first.click()
        page.get_by_text("it is lost").wait_for()
        assert state(server)["ram"]["total"] == entries
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("link", name="Back to the status page").wait_for()
        assert "was deleted in RAM" in page.inner_text("main")
        until(lambda: server.stats()["ram"]["entries"] == entries - 1)
        page.get_by_role("link", name="Back to the status page").click()
        page.get_by_role("heading", name="Tiers").wait_for()


# Without one


FORM = "application/x-www-form-urlencoded"
ACTIONS = {"flush": "", "clear": "", "demote": "entry=1", "delete": "tier=ram&entry=1"}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_changes_something_is_refused_to_others(server, name):
    before = server.stats()["ram"]["entries"]
    form = f"{ACTIONS[name]}&confirmed=yes".lstrip("&")
    own = f"127.0.0.1:{server.port}"
    assert post(server, name, form, Origin="http://evil.example")[0] == 403
    assert post(server, name, form, Origin="null")[0] == 403
    assert post(server, name, form, Origin=f"http://127.0.0.1:{server.port + 1}")[0] == 403
    assert post(server, name, form, Origin="http://evil.example", Host="evil.example")[0] == 403
    assert post(server, name, form, Host="evil.example")[0] == 403
    assert post(server, name, form, Host=own, Sec_Fetch_Site="cross-site")[0] == 403
    assert post(server, name, form, Content_Type="text/plain")[0] == 415
    assert post(server, name, b"x" * 5000)[0] == 413
    assert post(server, name, f"{form}&more=1")[0] == 400 and post(server, name, f"{form}&confirmed=yes")[0] == 400
    assert post(server, name, b"\xff\xfe")[0] == 400
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with closing(connection):
        connection.putrequest("POST", f"/tiered/{name}")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
    for method in ("GET", "PUT", "DELETE"):
        status, _ = server.request(method, f"/tiered/{name}?{form}")
        assert status == 405 if method == "GET" else status in (405, 501)
    status, text = post(server, name, ACTIONS[name])
    assert status in (200, 404) and "Back to the status page" in text  # asked, not done
    assert post(server, name, ACTIONS[name], Accept="application/json")[0] in (404, 409)
    assert server.stats()["ram"]["entries"] == before


@pytest.mark.parametrize(
    "path",
    ["/tiered/", "/tiered/../stats", "/tiered/%2e%2e/stats", "/tiered/static/../../../etc/passwd", "/tiered/page.html", "/tiered/templates/page.html", "/tiered/style.css/", "/TIERED", "/tiered/style.css%00"],
)
def test_no_other_path_leads_anywhere(server, path):
    status, body = server.request("GET", path)
    assert status == 404 and b"root:" not in body and b"<html" not in body


def test_entries_that_are_not_there(server):
    for body in ("tier=ram&entry=999999", "tier=ram&entry=..%2f..", "tier=ssd&entry=..%2f..%2fetc%2fpasswd", "tier=ssd&entry=%00"):
        status, text = post(server, "delete", f"{body}&confirmed=yes", Accept="application/json")
        assert (status, json.loads(text)) == (404, {"error": "That entry is not there any more."})
    assert post(server, "delete", "tier=tape&entry=1&confirmed=yes")[0] == 400
    assert post(server, "demote", "entry=999999&confirmed=yes")[0] == 404
    assert post(server, "delete", f"tier=ram&entry={'9' * 300}&confirmed=yes")[0] == 400


def test_the_page_says_how_it_may_be_used(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with closing(connection):
        connection.request("GET", "/tiered")
        reply = connection.getresponse()
        headers, text = dict(reply.getheaders()), reply.read().decode()
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|(?:src|href)=\"(?!/|#|data:,)", text)


def test_streams_of_events_end_with_the_server_and_are_bounded(server):
    from mlx_lm_tiered.serving.page.page import READERS

    streams = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(READERS)]
    try:
        for stream in streams:
            stream.request("GET", "/tiered/events")
            reply = stream.getresponse()
            assert reply.status == 200 and reply.readline() == b"retry: 3000\n"
        until(lambda: server.request("GET", "/tiered/events")[0] == 503)
    finally:
        for stream in streams:
            stream.close()

    def again() -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as stream:
            stream.request("GET", "/tiered/events")
            return stream.getresponse().status == 200

    until(again)


def test_a_stop_does_not_wait_for_who_looks(tiny_llama, tmp_path):
    with tiered(tiny_llama, None, log=tmp_path / "log") as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as stream:
            stream.request("GET", "/tiered/events")
            reply = stream.getresponse()
            ended = threading.Thread(target=reply.read)
            ended.start()
            started = time.monotonic()
            assert server.terminate() == 0
            assert time.monotonic() - started < 5
            ended.join(5)
            assert not ended.is_alive()


def test_there_is_no_page_and_no_metrics_where_they_are_off(server, tiny_llama, tmp_path):
    assert all(server.request("GET", path)[0] == 200 for path in ("/tiered", "/metrics"))
    with tiered(tiny_llama, None, "--metrics", "off", env={"MLX_LM_TIERED_STATUS_PAGE": "off"}, log=tmp_path / "log") as other:
        assert all(other.request("GET", path)[0] == 404 for path in ("/tiered", "/tiered/state", "/metrics"))
        assert other.request("GET", "/stats")[0] == 200
