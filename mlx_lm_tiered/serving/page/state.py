"""What the status page and ``mlx_lm.tiered top`` show, as JSON: the report of `/stats`, requests, restores, entries. Any thread; times are seconds, rates of 1."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from mlx_lm_hooks import Served

from ...identity import model_name
from ...prefix.lookup import Lookup
from ...runtime import Runtime
from ...served import NOTE
from ...statistics import TIERS

ROWS = 25  # entries of a tier, and requests, that are shown


def figures(runtime: Runtime) -> dict[str, Any]:
    """What is had at once: counters, and what goes on now."""
    report, now = runtime.report(), time.monotonic()
    source = runtime.source
    return {
        "model": model_name(source.path) if source is not None else "",
        "report": report,
        "tiers": [_tier(report, name) for name in TIERS if name == "ram" or report["shared" if name == "shared" else "ssd"] is not None],
        "running": [_running(request, now) for request in runtime.requests.running()],
        "restores": [] if runtime.storage is None else [dict(zip(("tokens", "read_bytes", "bytes"), one, strict=True)) for one in runtime.storage.restorer.progress()],
    }


def lists(runtime: Runtime) -> dict[str, Any]:
    """What takes milliseconds: the last requests, and the tiers' entries, for which every file is looked at."""
    now = time.monotonic()
    rows, total = runtime.manager.in_ram(ROWS)
    files, stored = runtime.manager.on_disk(ROWS)
    return {
        "last": [_ended(request, now) for request in runtime.requests.last()[:ROWS]],
        "ram": {"rows": [asdict(row) for row in rows], "total": total},
        "disk": {"rows": [asdict(row) for row in files], "total": stored},
    }


def _tier(report: dict[str, Any], name: str) -> dict[str, Any]:
    ssd = report["ssd"]
    held: tuple[int | None, int | None, int | None]
    if name == "shared":
        held = None, None, None  # others fill it, too
    elif name == "queue":
        held = ssd["pending"], ssd["pending_bytes"], ssd["max_pending_bytes"]
    else:
        held = tuple((report["ram"] if name == "ram" else ssd)[field] for field in ("entries", "bytes", "max_bytes"))
    lookups, hits = report["lookups"], report["hits_by_tier"][name]
    return {
        "name": name,
        **dict(zip(("entries", "bytes", "max_bytes"), held, strict=True)),
        "hits": hits,
        "hit_rate": hits / lookups if lookups else None,
        "tokens_saved": report["tokens_saved_by_tier"][name],
        "prefill_seconds_saved": report["prefill_seconds_saved_by_tier"][name],
    }


def _running(request: Served, now: float) -> dict[str, Any]:
    lookup = request.notes.get(NOTE)
    if request.started is None:
        phase = "waiting"
    else:
        phase = "prefill" if request.first_token is None else "decoding"
    return {
        "phase": phase,
        "seconds": now - request.arrived,
        **_counts(request, lookup),
        "processed": request.processed,
        "to_process": request.to_process or max(0, request.prompt_tokens - request.reused_tokens),
    }


def _ended(request: Served, now: float) -> dict[str, Any]:
    lookup = request.notes.get(NOTE)
    return {
        "ago": now - request.ended if request.ended is not None else 0.0,
        **_counts(request, lookup),
        "restore_seconds": lookup.restore_seconds if lookup is not None else None,
        "ttft_seconds": request.first_token - request.arrived if request.first_token is not None else None,
        "seconds": request.ended - request.arrived if request.ended is not None else None,
        "finish": request.finish,
        "why": _why(lookup),
        "text": request.notes.get("tiered_text"),
    }


def _counts(request: Served, lookup: Lookup | None) -> dict[str, Any]:
    first, last = request.first_token, request.last_token
    decoding = last - first if first is not None and last is not None else 0.0
    return {
        "prompt_tokens": request.prompt_tokens,
        "reused_tokens": request.reused_tokens,
        "tier": lookup.tier if lookup is not None and request.reused_tokens else "",
        "tokens": request.tokens,
        "tokens_per_second": (request.tokens - 1) / decoding if decoding > 0 else None,
    }


def _why(lookup: Lookup | None) -> str:
    """Why not more was reused; empty when all that can be was."""
    if lookup is None:
        return ""
    decision = str(lookup.decision) if lookup.decision is not None and lookup.decision.action != "restored" else ""
    return "; ".join(part for part in (decision, lookup.why) if part)
