"""Speculation's settings beside mlx-lm's own flags for a draft model."""

from __future__ import annotations

from mlx_lm_hooks import Invocation, UsageError

# More than any draft is worth, and few enough that all positions' logits fit.
MOST = 64


def chosen_tokens(speculation: str, invocation: Invocation) -> int | None:
    """How many tokens ``--num-draft-tokens`` says, where it was given and `speculation` is on. Raises UsageError."""
    if speculation == "off" or invocation.command != "server":
        return None
    if getattr(invocation.args, "draft_model", None) is not None:
        raise UsageError(f"--speculation {speculation} and --draft-model are two sources of drafts; leave one of them out")
    if "num_draft_tokens" not in invocation.given:
        return None
    tokens = invocation.args.num_draft_tokens
    if not 1 <= tokens <= MOST:
        raise UsageError(f"--num-draft-tokens {tokens} is not between 1 and {MOST}; leave --speculation out to draft none")
    return int(tokens)
