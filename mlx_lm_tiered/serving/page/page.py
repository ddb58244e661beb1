"""The page and its figures, shared by all who look: made at most once a second, what takes longer in a small share of the time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm_hooks import Reply, Request

from ...runtime import Runtime
from ...settings import Settings
from ..replies import reply
from ..tokens import Tokens
from .render import SECTIONS, STATIC, Renderer, static
from .state import figures, lists

EVERY = 1.0  # seconds between two looks
SHARE = 0.001  # of the time, that each part of looking and making HTML may take
LONGEST = 5.0  # seconds between two looks, whatever they take
RELOAD = 2.0  # the same for who loads the page, and may have no script that shows him more
READERS = 16  # streams of events at once: each has a thread
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
HTML = "text/html; charset=utf-8"


LISTS = ("requests", "ram", "disk")


@dataclass
class Part:
    """A part of the figures, and the sections that are made of it and of the parts before."""

    look: Callable[[Runtime], dict[str, Any]]
    sections: Sequence[str]
    looked_at: float = 0.0
    stale_at: float = 0.0


class Page:
    """Thread-safe; its handlers run on HTTP threads."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._settings: Settings = runtime.settings
        self._tokens = Tokens(runtime.args)
        self.renderer = Renderer()
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {}
        self._sections: dict[str, str] = {}
        self._parts = [
            Part(figures, [name for name in SECTIONS if name not in LISTS]),
            Part(lists, LISTS),
        ]
        self._readers = 0

    def handle(self, request: Request) -> Reply:
        """``GET /tiered``."""
        found, sections = self._look(RELOAD)
        metrics = (self._settings.metrics or self._settings.admin_routes) != "off"
        return page(200, self.renderer.page({**found, "metrics": metrics}, sections))

    def state(self, request: Request) -> Reply:
        """``GET /tiered/state``: the same as JSON."""
        found, _ = self._look()
        answer = reply(200, found)
        return answer._replace(headers=HEADERS)

    def static(self, request: Request) -> Reply:
        """What the page needs. Routes are exact, so that the name is one of these."""
        name = request.path.rpartition("/")[2]
        return Reply(200, static(name), STATIC[name], HEADERS)

    def events(self, request: Request) -> Reply:
        """``GET /tiered/events``: the sections that have changed, as server-sent events, until the client goes or the server stops."""
        with self._lock:
            if self._readers >= READERS:
                return reply(503, {"error": f"{READERS} pages are open already"})
            self._readers += 1
        return Reply(200, self._events(), "text/event-stream; charset=utf-8", HEADERS)

    def changed(self) -> None:
        """Something was done: look anew."""
        for part in self._parts:
            part.stale_at = 0.0

    def _events(self) -> Generator[bytes, None, None]:
        try:
            sent: dict[str, str] = {}
            yield b"retry: 3000\n\n"
            while not self._stopping():
                _, sections = self._look()
                news = {name: html for name, html in sections.items() if sent.get(name) != html}
                sent = sections
                # A comment when there is none: who has gone is noticed by it.
                yield f"event: sections\ndata: {json.dumps(news)}\n\n".encode() if news else b": nothing new\n\n"
                time.sleep(EVERY)
        finally:
            with self._lock:
                self._readers -= 1

    def _stopping(self) -> bool:
        engine = self._runtime.engine
        return engine is not None and engine.stopping

    def _look(self, oldest: float = LONGEST) -> tuple[dict[str, Any], dict[str, str]]:
        """What is known, no older than so many seconds, and the inside of every section, in the page's order."""
        with self._lock:
            self.renderer.prepare()
            for part in self._parts:
                if time.monotonic() >= min(part.stale_at, part.looked_at + oldest):
                    if part is self._parts[-1] and self._settings.cache_inspection:
                        self._read_partings()
                    self._refresh(part)
            return dict(self._state), {name: self._sections[name] for name in SECTIONS}

    def _refresh(self, part: Part) -> None:
        started, part.looked_at = time.thread_time(), time.monotonic()
        self._state |= part.look(self._runtime)
        self._sections |= self.renderer.sections(part.sections, self._state)
        part.stale_at = time.monotonic() + min(LONGEST, max(EVERY, (time.thread_time() - started) / SHARE))

    def _read_partings(self) -> None:
        """The text of the places where prompts left what is stored, for the page."""
        from ...served import NOTE

        for request in self._runtime.requests.last():
            lookup = request.notes.get(NOTE)
            if lookup is None or lookup.parting is None or lookup.parting.model is None or "tiered_text" in request.notes:
                continue
            at = lookup.parting
            request.notes["tiered_text"] = {
                name: self._tokens.text(at.model, tokens) for name, tokens in (("before", at.before), ("prompt", at.prompt), ("stored", at.stored))
            }


def page(status: int, text: str) -> Reply:
    """HTML."""
    return Reply(status, text.encode(), HTML, HEADERS)
