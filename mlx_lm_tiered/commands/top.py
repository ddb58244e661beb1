"""``mlx_lm.tiered top``: the status page in a terminal, live; plain text, once, elsewhere."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from mlx_lm_hooks import PluginError

from ..serving.page.words import UNKNOWN, ago, number, percent, rate, seconds, size, tier
from .asking import HINT, exchange
from .cache.entries import printable

REQUESTS = 12  # of the last ones
ENTRIES = 8  # of a tier
BAR = 16

# What a terminal is told: another screen and back, home, the rest of a line and of the screen to be empty.
ENTER, LEAVE, HOME, END_OF_LINE, END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def run(args: argparse.Namespace) -> int:
    """Show until Ctrl-C; 1 when the server does not answer."""
    out = sys.stdout
    live = out.isatty() and not args.once
    every = args.every or (1.0 if live else None)
    if args.once or every is None:
        print("\n".join(text for _, text in lines(look(args.server))), file=out)
        return 0
    if not live:
        return _follow(args.server, every, out)
    out.write(ENTER)
    try:
        while True:
            draw(_looked(args.server), out)
            time.sleep(every)
    except KeyboardInterrupt:
        return 0
    finally:
        out.write(LEAVE)
        out.flush()


def look(url: str) -> dict[str, Any]:
    """What the server shows (``GET /tiered/state``). Raises UsageError, PluginError."""
    status, value = exchange(url, "GET", "/tiered/state")
    if status != 200 or value is None or "report" not in value:
        why = value.get("error") if value is not None else HINT
        raise PluginError(f"{url} answers {status}: {why}")
    return value


def _looked(url: str) -> list[tuple[bool, str]]:
    """The lines of a look; a server that stops may come back, so it is waited for."""
    try:
        return lines(look(url))
    except PluginError as error:
        return [(True, printable(str(error)))]


def _follow(url: str, every: float, out: TextIO) -> int:
    """One look after the other, for a file or a pipe."""
    try:
        while True:
            print("\n".join(text for _, text in lines(look(url))), end="\n\n", file=out, flush=True)
            time.sleep(every)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def draw(shown: Sequence[tuple[bool, str]], out: TextIO) -> None:
    """Lines on a terminal, as many and as much of them as it has room for."""
    columns, rows = shutil.get_terminal_size()
    cut = [(bold, text[: columns - 1]) for bold, text in shown[: rows - 1]]
    out.write(HOME + "".join(f"{BOLD if bold else ''}{text}{PLAIN if bold else ''}{END_OF_LINE}\r\n" for bold, text in cut) + END)
    out.flush()


def lines(state: dict[str, Any]) -> list[tuple[bool, str]]:
    """What is shown, each line with whether it is a heading. Nothing of it makes a terminal do something."""
    return [(bold, printable(text)) for bold, text in _lines(state)]


def _lines(state: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    report = state["report"]
    requests, lookups = report["requests"] or {"running": 0, "queued": 0}, report["lookups"]
    yield True, f"{state['model'] or 'no model'}   up {ago(report['uptime_s'])}   running {requests['running']}   waiting {requests['queued']}"
    share = report["tokens_saved"] / report["prompt_tokens"] if report["prompt_tokens"] else None
    saved = sum(report["prefill_seconds_saved_by_tier"].values()) or None
    yield False, f"lookups {number(lookups)}   prompt tokens reused {percent(share)} ({number(report['tokens_saved'])})   prefill saved {seconds(saved)}"
    yield from _table("", ("tier", "entries", "bytes of cap", "hits", "rate", "tokens saved", "prefill saved"), [
        (tier(one["name"]), number(one["entries"]), _filled(one['bytes'], one['max_bytes']), number(one["hits"]),
         percent(one["hit_rate"]), number(one["tokens_saved"]), seconds(one["prefill_seconds_saved"] or None))
        for one in state["tiers"]
    ])  # fmt: skip
    yield from _table("Now", ("state", "for", "prompt", "reused", "from", "prefill", "generated", "tokens/s"), [
        (one["phase"], seconds(one["seconds"]), number(one["prompt_tokens"]), number(one["reused_tokens"]), tier(one["tier"]),
         f"{_bar(one['processed'], one['to_process'])} {number(one['processed'])} of {number(one['to_process'])}", number(one["tokens"]), rate(one["tokens_per_second"]))
        for one in state["running"]
    ])  # fmt: skip
    yield from _table("Restores", ("tokens", "read"), [
        (number(one["tokens"]), f"{_bar(one['read_bytes'], one['bytes'])} {size(one['read_bytes'])} of {size(one['bytes'])}") for one in state["restores"]
    ])  # fmt: skip
    yield from _table("Last requests", ("ago", "prompt", "reused", "from", "restore", "first token", "generated", "tokens/s", "end", "why not more"), [
        (ago(one["ago"]), number(one["prompt_tokens"]), number(one["reused_tokens"]), tier(one["tier"]), seconds(one["restore_seconds"]), seconds(one["ttft_seconds"]),
         number(one["tokens"]), rate(one["tokens_per_second"]), one["finish"], one["why"] or UNKNOWN)
        for one in state["last"][:REQUESTS]
    ])  # fmt: skip
    for name, title in (("ram", "Entries in RAM"), ("disk", "Entries on disk")):
        rows, total = state[name]["rows"], state[name]["total"]
        yield from _table(f"{title} ({number(total)})", ("tokens", "size", "last use", "on disk", "model"), [
            (number(one["tokens"]), size(one["nbytes"]), ago(one["used"]), "yes" if one["durable"] else "no", one["model"]) for one in rows[:ENTRIES]
        ])  # fmt: skip
    yield from _rest(report)


def _rest(report: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    yield False, ""
    if (ssd := report["ssd"]) is not None:
        yield False, f"spill queue {number(ssd['pending'])} ({size(ssd['pending_bytes'])}), written {number(ssd['written'])}, dropped {number(ssd['dropped'])}, failed {number(ssd['failed'])}; not on disk {number(ssd['undurable'])}"
    if (memory := report["memory"]) is not None:
        yield False, f"arrays {size(memory['live'])} of {size(memory['budget'])}"
    if (pool := report["paged"]) is not None:
        yield False, f"pool {number(pool['blocks_used'])} of {number(pool['blocks'])} blocks, {number(pool['blocks_shared'])} shared, {number(pool['waiting'])} requests wait"
    if (drafts := report["speculation"]) is not None:
        places = "  ".join(percent(one) for one in drafts["acceptance_by_position"])
        yield False, f"drafts from {drafts['source']}: {percent(drafts['acceptance'])} accepted" + (f", by place {places}" if places else "")
    if report["faults"]:
        yield False, "faults: " + ", ".join(f"{kind} {count}" for kind, count in report["faults"].items())


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[tuple[bool, str]]:
    """Nothing for no rows."""
    if not rows:
        return
    yield False, ""
    if title:
        yield True, title
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield False, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _filled(held: int | None, most: int | None) -> str:
    """Nothing where a cap is not this server's."""
    return f"{_bar(held, most)} {size(held)} of {size(most)}" if held is not None and most is not None else ""


def _bar(value: float, total: float) -> str:
    filled = round(BAR * min(1.0, value / total)) if total else 0
    return "[" + "#" * filled + "." * (BAR - filled) + "]"
