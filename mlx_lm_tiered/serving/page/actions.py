"""What the page's buttons do: POST only, from the page's own origin only, and only when confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from mlx_lm_hooks import Reply, Request

from ...managing import NoSuchEntry
from ...prefix.orders import Busy
from ...runtime import Runtime
from ...settings import format_size
from ..replies import reply
from .page import HEADERS, Page, page

LARGEST_BODY = 4096
LONGEST_FIELD = 256
FLUSH_TIMEOUT = 600.0

Fields = Mapping[str, str]


class Refusal(Exception):
    """A request that is not done: status and one sentence."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Action(NamedTuple):
    """`asks` is what is asked before it is done, `does` does it and says what was done; either may raise Refusal or NoSuchEntry."""

    fields: tuple[str, ...]
    button: str
    asks: Callable[[Fields], str]
    does: Callable[[Fields], str]


class Actions:
    """Those of one run. On HTTP threads."""

    def __init__(self, runtime: Runtime, shown: Page):
        self._runtime = runtime
        self._page = shown
        self.table = {
            "flush": Action((), "Write all to disk", lambda f: "Have everything written to disk now? Running requests finish first.", self._flush),
            "clear": Action((), "Clear all tiers", lambda f: "Delete every stored prefix, in RAM and on disk? This cannot be undone.", self._clear),
            "demote": Action(("entry",), "Demote", lambda f: f"Have entry {f['entry']} leave RAM for the disk?", self._demote),
            "delete": Action(("tier", "entry"), "Delete", self._asks_delete, self._delete),
        }

    def handler(self, name: str) -> Callable[[Request], Reply]:
        """The handler of ``POST /tiered/NAME``."""
        action = self.table[name]

        def handle(request: Request) -> Reply:
            as_json = "application/json" in header(request, "Accept")
            try:
                check(request)
                fields = fields_of(request, (*action.fields, "confirmed"))
                if fields.pop("confirmed", "") != "yes":
                    question = {"action": f"/tiered/{name}", "fields": fields, "button": action.button}
                    text = action.asks(fields)
                    return reply(409, {"error": f"not confirmed: {text}"}) if as_json else page(200, self._page.renderer.message(text, question))
                text, status = action.does(fields), 200
            except Refusal as error:
                text, status = str(error), error.status
            except NoSuchEntry:
                text, status = "That entry is not there any more.", 404
            except Busy:
                text, status = "Nothing was done: the server is busy with a step that takes long. Try again.", 503
            except OSError as error:
                text, status = f"The cache directory could not be changed: {error.strerror or error}", 500
            self._page.changed()
            if as_json:
                return reply(status, {"message" if status == 200 else "error": text})._replace(headers=HEADERS)
            return page(status, self._page.renderer.message(text))

        return handle

    def _flush(self, fields: Fields) -> str:
        report = self._runtime.flush(FLUSH_TIMEOUT)
        if report["durable"]:
            return f"Everything is on disk: {report['entries']} entries."
        if "reason" in report:
            raise Refusal(409, f"Nothing was written: {report['reason']}.")
        raise Refusal(503, f"Not everything is on disk: {report['pending']} entries wait, {report['dropped']} were dropped, {report['failed']} failed.")

    def _clear(self, fields: Fields) -> str:
        entries, files = self._runtime.manager.clear()
        return f"Cleared: {entries} entries in memory, {files} files on disk."

    def _demote(self, fields: Fields) -> str:
        try:
            left = self._runtime.manager.demote(fields["entry"])
        except ValueError as error:
            raise Refusal(409, f"Nothing was done: {error}.") from None
        return f"Entry {fields['entry']} has left RAM." if left else f"Entry {fields['entry']} is being written and leaves RAM when it is on disk."

    def _asks_delete(self, fields: Fields) -> str:
        if fields["tier"] == "ram":
            return f"Delete entry {fields['entry']} in RAM? If it is not on disk, it is lost."
        needed = self._runtime.manager.continuing(fields["entry"])
        entry = self._runtime.manager.find_on_disk(fields["entry"])
        also = f", and the {needed} that need it" if needed else ""
        return f"Delete an entry of {entry.length:,} tokens ({format_size(entry.nbytes)}) on disk{also}? This cannot be undone."

    def _delete(self, fields: Fields) -> str:
        manager, name = self._runtime.manager, fields["entry"]
        if fields["tier"] == "ram":
            manager.delete_in_ram(name)
            return f"Entry {name} was deleted in RAM."
        if fields["tier"] != "ssd":
            raise Refusal(400, "The tier is neither ram nor ssd.")
        return f"Deleted on disk: {manager.delete_on_disk(name)} files."


def header(request: Request, name: str) -> str:
    """A header's value, empty without it."""
    return next((value for key, value in request.headers.items() if key.lower() == name.lower()), "")


def check(request: Request) -> None:
    """Raise Refusal unless the request comes from the page, or from a program of this machine.

    The host looks at the origin of routes for this machine only. These routes look
    themselves: with ``--admin-routes all``, too, no other page may press their buttons.
    """
    if len(request.body) > LARGEST_BODY:
        raise Refusal(413, f"The body has more than {LARGEST_BODY} bytes.")
    origin, site = header(request, "Origin"), header(request, "Sec-Fetch-Site")
    if origin and urlsplit(origin).netloc.lower() != header(request, "Host").lower() or site not in ("", "none", "same-origin"):
        raise Refusal(403, "Only the status page itself may do that.")
    if not origin and not request.local:
        raise Refusal(403, "Without an Origin only clients on this machine may do that.")
    if header(request, "Content-Type").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        raise Refusal(415, "The body is no form (application/x-www-form-urlencoded).")


def fields_of(request: Request, allowed: tuple[str, ...]) -> dict[str, str]:
    """The form's fields: each of `allowed` but ``confirmed`` once, and no other. Raises Refusal."""
    try:
        pairs = parse_qsl(request.body.decode("ascii"), keep_blank_values=True, strict_parsing=bool(request.body), max_num_fields=8)
    except ValueError:
        raise Refusal(400, "The form cannot be read.") from None
    fields = dict(pairs)
    needed = set(allowed) - {"confirmed"}
    if len(fields) != len(pairs) or not needed <= fields.keys() <= set(allowed) or any(len(value) > LONGEST_FIELD for value in fields.values()):
        raise Refusal(400, f"The form must have these fields, once each: {', '.join(sorted(needed)) or 'none'}.")
    return fields
