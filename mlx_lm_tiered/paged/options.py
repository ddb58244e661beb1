"""What paged KV cannot be combined with yet."""

from __future__ import annotations

from mlx_lm_hooks import Invocation, UsageError

from ..schemes.spec import Spec
from ..settings import Settings, flag, format_size


def check(settings: Settings, spec: Spec, invocation: Invocation) -> None:
    """Refuse a start that paging cannot serve. Raises UsageError with one sentence."""
    if invocation.command != "server":
        raise UsageError("--paged-kv is for servers; leave it out")
    if spec.start > 0 and spec.form is not None:
        advice = "add --quantized-kv-start 0" if spec.origin == "--kv-bits" else f"use {spec.form.word}:{spec.form}"
        raise UsageError(f"--paged-kv has blocks of one form, and {spec.origin} {spec} changes it at token {spec.start}; {advice}")
    for name in ("prompt_cache_bytes", "prompt_cache_size"):
        if getattr(settings, name) == 0:
            raise UsageError(f"--paged-kv needs the RAM tier, which {flag(name)} 0 switches off; leave one of them out")
    if settings.paged_kv_block_size < 1:
        raise UsageError("--paged-kv-block-size 0: a block has at least one token")
    if settings.paged_kv_pool == 0:
        raise UsageError("--paged-kv-pool 0 leaves no block; leave out --paged-kv for plain caches")
    if settings.memory_budget and settings.paged_kv_pool is not None and settings.paged_kv_pool > settings.memory_budget:
        raise UsageError(
            f"--paged-kv-pool of {format_size(settings.paged_kv_pool)} does not fit into --memory-budget of {format_size(settings.memory_budget)}"
        )
