"""The page's HTML, from templates beside this module. Everything that is put into them is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from . import words

if TYPE_CHECKING:
    from jinja2 import Environment

# Each has a template of its name and is sent anew when it has changed.
SECTIONS = {
    "tiers": "Tiers",
    "now": "Now",
    "requests": "Last requests",
    "ram": "Entries in RAM",
    "disk": "Entries on disk",
    "queue": "Spill queue and restores",
    "memory": "Memory",
    "speculation": "Speculation",
}
STATIC = {"style.css": "text/css; charset=utf-8", "script.js": "text/javascript; charset=utf-8"}


class Renderer:
    """Makes HTML. Thread-safe."""

    @cached_property
    def _environment(self) -> Environment:
        """Made when somebody looks: a server must not start later for it."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        found = Environment(loader=PackageLoader(__package__, "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        found.filters.update({one.__name__: one for one in (words.size, words.number, words.percent, words.seconds, words.ago, words.rate, words.tier)})
        found.globals.update(SECTIONS=SECTIONS)
        return found

    def prepare(self) -> None:
        """Read the templates, which takes a tenth of a second, once."""
        for name in SECTIONS:
            self._environment.get_template(f"section-{name}.html")

    def sections(self, names: Iterable[str], state: dict[str, Any]) -> dict[str, str]:
        """The inside of sections."""
        return {name: self._environment.get_template(f"section-{name}.html").render(state) for name in names}

    def page(self, state: dict[str, Any], sections: dict[str, str]) -> str:
        """The whole page."""
        return self._environment.get_template("page.html").render(state, sections=sections)

    def message(self, text: str, question: dict[str, Any] | None = None) -> str:
        """A page of one sentence, and with a `question` (``action``, ``fields``, ``button``) a form that asks whether it is meant."""
        return self._environment.get_template("message.html").render(text=text, question=question)


def static(name: str) -> bytes:
    """A file that the page needs, one of `STATIC`."""
    return (files(__package__) / "static" / name).read_bytes()
