"""Settings that say how drafts are verified, whatever they come from."""

from __future__ import annotations

from mlx_lm_hooks import Invocation, UsageError

from ..settings import AUTO, Settings, flag
from ..statistics import Statistics
from .choose import Drafting
from .trace import Trace

NAMES = ("spec_strict", "spec_sampling", "spec_trace")


def check(settings: Settings, drafting: Drafting, invocation: Invocation) -> None:
    """Refuse what does nothing or contradicts itself. Raises UsageError."""
    if drafting.source == "off":
        for name in NAMES:
            # An environment name alone may come from a shell profile; a flag is meant.
            if name in invocation.given and getattr(settings, name) != getattr(Settings, name):
                raise UsageError(f"{flag(name)} does nothing without --speculation or --draft-model; add one or leave it out")
    elif settings.spec_strict and settings.num_draft_tokens == AUTO:
        raise UsageError("--spec-strict computes each token as without drafts, so none pays and --num-draft-tokens auto would draft none; give a number")


def open_trace(settings: Settings, drafting: Drafting, statistics: Statistics) -> Trace | None:
    """The trace that is asked for. Raises UsageError when it cannot be written."""
    return Trace(settings.spec_trace, statistics) if settings.spec_trace is not None and drafting.source != "off" else None
