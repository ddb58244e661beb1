"""Every metric once: its name, what it counts, and where in the report of `/stats` it is.

The names are vLLM's as far as there is the like of it there, with ``mlx_lm_`` in place
of ``vllm:`` and with the unit, so that who knows the one finds the other (the
documentation has both side by side).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

PREFIX = "mlx_lm_"

Report = Mapping[str, Any]


class Metric(NamedTuple):
    """`find` gives a number, with a `label` numbers by its value; None: there is nothing of it in this run. Counters get ``_total`` from the format."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    find: Callable[[Report], Any]
    label: str = ""

    def read(self, report: Report) -> dict[str, float] | None:
        """Numbers by the label's value ("" without one); None when there are none."""
        found = self.find(report)
        if found is None:
            return None
        values = found if self.label else {"": found}
        return {label: value for label, value in values.items() if value is not None} or None


def _at(*path: str) -> Callable[[Report], Any]:
    """What lies there, None where a part of the way is missing."""

    def find(report: Report) -> Any:
        value: Any = report
        for name in path:
            if value is None:
                return None
            value = value[name]
        return value

    return find


def _each(part: str, **fields: str) -> Callable[[Report], Any]:
    """Fields of a part of the report, by the label's values."""
    return lambda report: None if report[part] is None else {label: report[part][field] for label, field in fields.items()}


def _tiers(field: str) -> Callable[[Report], Any]:
    queue = {"entries": "pending", "bytes": "pending_bytes", "max_bytes": "max_pending_bytes"}.get(field)

    def find(report: Report) -> Any:
        ssd = report["ssd"]
        found = {"ram": report["ram"][field]}
        if ssd is not None:
            found |= {"ssd": ssd[field], **({"queue": ssd[queue]} if queue is not None else {})}
        return found

    return find


def _lookups(report: Report) -> dict[str, int]:
    return {**report["hits_by_tier"], "none": report["misses"]}


def _pool_usage(report: Report) -> float | None:
    """Of the pool's blocks, or without one of the RAM tier, the share in use."""
    if (pool := report["paged"]) is not None:
        return pool["blocks_used"] / pool["blocks"] if pool["blocks"] else None
    ram = report["ram"]
    return ram["bytes"] / ram["max_bytes"] if ram["max_bytes"] else None


def _requests(report: Report) -> dict[str, int] | None:
    """To the shared store."""
    if (shared := report["shared"]) is None:
        return None
    return {kind: count for kind, count in shared["requests"].items() if not kind.endswith("_bytes")}


def _blocks(report: Report) -> dict[str, int] | None:
    if (pool := report["paged"]) is None:
        return None
    return {"total": pool["blocks"], "used": pool["blocks_used"], "shared": pool["blocks_shared"], "reserved": pool["blocks_reserved"]}


def _refused(report: Report) -> dict[str, int]:
    parts = [part for part in (report["memory"], report["paged"]) if part is not None]
    return {status: sum(part[f"refused_{status}"] for part in parts) for status in ("400", "503")}


def _positions(report: Report) -> dict[str, int] | None:
    spec = report["speculation"]
    return None if spec is None else {str(place): count for place, count in enumerate(spec["accepted_by_position"])}


METRICS = (
    Metric("num_requests_running", "gauge", "Requests that are being served.", _at("requests", "running")),
    Metric("num_requests_waiting", "gauge", "Requests that came and have not begun.", _at("requests", "queued")),
    Metric("request_success", "counter", "Requests that ended, by reason: stop, length, abort, refused or error.", _at("requests", "finished"), "finished_reason"),
    Metric("prompt_tokens", "counter", "Tokens of prompts, reused ones included.", _at("requests", "prompt_tokens")),
    Metric("generation_tokens", "counter", "Tokens generated.", _at("requests", "generation_tokens")),
    Metric("prefix_cache_lookups", "counter", "Requests that looked for a stored prefix, by the tier that served it: ram, queue, ssd, shared or none.", _lookups, "tier"),
    Metric("prefix_cache_queried_tokens", "counter", "Prompt tokens of requests that looked for a stored prefix.", _at("prompt_tokens")),
    Metric("prefix_cache_hit_tokens", "counter", "Prompt tokens that were reused, by tier.", _at("tokens_saved_by_tier"), "tier"),
    Metric("prefix_cache_saved_prefill_seconds", "counter", "What computing the reused tokens would have taken, by measured rates, by tier.", _at("prefill_seconds_saved_by_tier"), "tier"),
    Metric("kv_cache_usage_ratio", "gauge", "Share in use of the paged pool; without one, of the RAM tier. 1 is all of it.", _pool_usage),
    Metric("cache_entries", "gauge", "Stored prefixes, by tier.", _tiers("entries"), "tier"),
    Metric("cache_bytes", "gauge", "Bytes that a tier takes.", _tiers("bytes"), "tier"),
    Metric("cache_max_bytes", "gauge", "Bytes that a tier may take.", _tiers("max_bytes"), "tier"),
    Metric("cache_evictions", "counter", "Stored prefixes that left a tier for want of room.", _tiers("evictions"), "tier"),
    Metric("cache_puts", "counter", "Prefixes handed to the tiers.", _at("puts")),
    Metric("cache_demotions", "counter", "Prefixes that left RAM because they were not used, or when told to.", _at("demotions")),
    Metric("cache_faults", "counter", "Faults that were dealt with, by kind.", _at("faults"), "kind"),
    Metric("restored_tokens", "counter", "Tokens of prefixes read back from the SSD tier.", _at("ssd", "restored_tokens")),
    Metric("restored_bytes", "counter", "Bytes read back from the SSD tier.", _at("ssd", "restored_bytes")),
    Metric("restores_in_flight", "gauge", "Restores in the background that are being read or not taken yet.", _at("ssd", "restores_in_flight")),
    Metric("restores_waiting", "gauge", "Restores in the background that wait for their turn.", _at("ssd", "restores_waiting")),
    Metric("restore_held_seconds", "counter", "How long requests were held back for their restore while others went on.", _at("ssd", "held_seconds_total")),
    Metric("ssd_written_bytes", "counter", "Bytes written to the SSD tier.", _at("ssd", "written_bytes")),
    Metric("ssd_errors", "counter", "Reads and writes that failed, and damaged entries.", _each("ssd", read="read_errors", write="write_errors", corrupt="corrupt"), "kind"),
    Metric("spill_queue_entries", "gauge", "Entries that wait to be written, or are being written.", _at("ssd", "pending")),
    Metric("spill_queue_bytes", "gauge", "Their bytes.", _at("ssd", "pending_bytes")),
    Metric("spill_queue_undurable_entries", "gauge", "Token sequences that were offered and are not on disk.", _at("ssd", "undurable")),
    Metric("spill_queue_jobs", "counter", "What became of entries that were to be written: written, dropped or failed.", _each("ssd", written="written", dropped="dropped", failed="failed"), "result"),
    Metric("shared_cache_lookups", "counter", "Requests for which the shared store was asked, by what came of it: misses, fetched, not_worth, late, failed, refused or cancelled.", _each("shared", misses="misses", fetched="fetched", not_worth="not_worth", late="late", failed="failed", refused="refused", cancelled="cancelled"), "result"),
    Metric("shared_fetched_bytes", "counter", "Bytes fetched from the shared store.", _at("shared", "fetched_bytes")),
    Metric("shared_uploaded_entries", "counter", "Entries uploaded to the shared store.", _at("shared", "uploads")),
    Metric("shared_pending_entries", "gauge", "Entries that wait for their upload.", _at("shared", "pending")),
    Metric("shared_requests", "counter", "Requests to the shared store, by kind.", _requests, "kind"),
    Metric("memory_live_bytes", "gauge", "Bytes that arrays take.", _at("memory", "live")),
    Metric("memory_budget_bytes", "gauge", "Bytes that arrays may take.", _at("memory", "budget")),
    Metric("requests_refused", "counter", "Requests refused for want of memory or of blocks, by status.", _refused, "status"),
    Metric("paged_blocks", "gauge", "Blocks of the paged pool, by state; used ones include shared ones.", _blocks, "state"),
    Metric("num_preemptions", "counter", "Times that a row left the batch for want of blocks, and came back later.", _at("paged", "preempted")),
    Metric("paged_waiting_requests", "gauge", "Requests that wait for blocks.", _at("paged", "waiting")),
    Metric("spec_decode_num_drafts", "counter", "Drafts that were verified.", _at("speculation", "drafts")),
    Metric("spec_decode_num_draft_tokens", "counter", "Tokens drafted.", _at("speculation", "drafted")),
    Metric("spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were accepted.", _at("speculation", "accepted")),
    Metric("spec_decode_num_accepted_tokens_per_pos", "counter", "The same, by place in the draft, the first being 0.", _positions, "position"),
    Metric("checkpoints_written", "counter", "Checkpoints of running generations that were written.", _at("checkpoints", "written")),
    Metric("checkpoints_resumed", "counter", "Requests that went on from a checkpoint.", _at("checkpoints", "resumed")),
)

HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival until it left the queue.",
    "request_prefill_time_seconds": "From there to the first token, lookup and restore included.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_time_per_output_token_seconds": "Decode time for each token behind the first, a mean for each request.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "restore_time_seconds": "Reading a prefix back from the SSD tier.",
}


@functools.cache
def versions() -> dict[str, str]:
    """The labels of ``mlx_lm_build_info``."""
    from importlib.metadata import PackageNotFoundError, version

    from .. import __version__

    found = {"version": __version__}
    for name in ("mlx-lm", "mlx"):
        try:
            found[name.replace("-", "_")] = version(name)
        except PackageNotFoundError:
            continue
    return found
