"""Where drafts come from, by the plugin's settings and mlx-lm's own flags for a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mlx_lm_hooks import Invocation, UsageError

from ..settings import AUTO, Settings
from .artifacts import ASSISTANTS, model_type, resolve

# More than any draft is worth, and few enough that all positions' logits fit.
MOST = 64
# Upstream's default, which it needs where drafts are ours.
UPSTREAM = 3


class Drafting(NamedTuple):
    """A source's name (``off``: none), and the directory of its model if it has one."""

    source: str = "off"
    path: Path | None = None


OFF = Drafting()


def choose(settings: Settings, invocation: Invocation) -> Drafting:
    """The source of drafts. Where a draft model becomes ours, it is taken away from mlx-lm. Raises UsageError."""
    source, name = _named(settings, invocation)
    drafting = Drafting(source) if name is None else _artifact(name)
    tokens = settings.num_draft_tokens
    if "num_draft_tokens" in invocation.given and tokens == AUTO:
        if drafting.source == "off":
            raise UsageError("--num-draft-tokens auto is for --speculation and --draft-model; mlx-lm by itself wants a number")
        invocation.args.num_draft_tokens = UPSTREAM
    if drafting.source == "off":
        return drafting
    if isinstance(tokens, int) and not 1 <= tokens <= MOST:
        flag = "--speculation" if name is None else "--draft-model"
        raise UsageError(f"--num-draft-tokens {tokens} is not between 1 and {MOST}; leave {flag} out to draft none")
    if name is not None:
        # With one mlx-lm would serve one request at a time.
        invocation.args.draft_model = None
    return drafting


def _named(settings: Settings, invocation: Invocation) -> tuple[str, str | None]:
    """A source without a model, or a model's name."""
    source, model = settings.speculation, settings.draft_model
    if source == "off" or model is None:
        return source or "off", None
    if source is not None:
        by_flag = [name for name in ("speculation", "draft_model") if name in invocation.given]
        if len(by_flag) == 2:
            raise UsageError(f"--speculation {source} and --draft-model are two sources of drafts; leave one of them out")
        # The environment's may come from a shell profile.
        if by_flag == ["speculation"]:
            return source, None
    return "off", model


def _artifact(name: str) -> Drafting:
    try:
        path = resolve(name)
        return Drafting("assistant" if model_type(path) in ASSISTANTS else "draft", path)
    except ValueError as error:
        raise UsageError(f"--draft-model {name}: {error}") from None
