"""Speculation's settings beside mlx-lm's own flags for a draft model."""

from __future__ import annotations

from mlx_lm_hooks import Invocation, UsageError

from ..settings import AUTO

# More than any draft is worth, and few enough that all positions' logits fit.
MOST = 64
# Upstream's default, which it needs where drafts are ours.
UPSTREAM = 3


def check(speculation: str, tokens: int | str | None, invocation: Invocation) -> None:
    """Refuse what contradicts `speculation` where it is on; `tokens` is ``--num-draft-tokens``, where it was given. Raises UsageError."""
    drafted = getattr(invocation.args, "draft_model", None) is not None
    if "num_draft_tokens" in invocation.given and tokens == AUTO:
        if drafted or speculation == "off":
            raise UsageError("--num-draft-tokens auto is for --speculation; give a draft model a number")
        invocation.args.num_draft_tokens = UPSTREAM
    if speculation == "off":
        return
    if drafted:
        # The environment's may come from a shell profile: then the draft model drafts.
        if "speculation" in invocation.given:
            raise UsageError(f"--speculation {speculation} and --draft-model are two sources of drafts; leave one of them out")
    elif isinstance(tokens, int) and not 1 <= tokens <= MOST:
        raise UsageError(f"--num-draft-tokens {tokens} is not between 1 and {MOST}; leave --speculation out to draft none")
