"""Settings that say how drafts are verified, whatever they come from."""

from __future__ import annotations

from mlx_lm_hooks import Invocation, UsageError

from ..settings import AUTO, Settings, flag
from .choose import Drafting

NAMES = ("spec_strict", "spec_sampling")


def check(settings: Settings, drafting: Drafting, invocation: Invocation) -> None:
    """Refuse what does nothing or contradicts itself. Raises UsageError."""
    if drafting.source == "off":
        for name in NAMES:
            # An environment name alone may come from a shell profile; a flag is meant.
            if name in invocation.given and getattr(settings, name) != getattr(Settings, name):
                raise UsageError(f"{flag(name)} does nothing without --speculation or --draft-model; add one or leave it out")
    elif settings.spec_strict and settings.num_draft_tokens == AUTO:
        raise UsageError("--spec-strict computes each token as without drafts, so none pays and --num-draft-tokens auto would draft none; give a number")
