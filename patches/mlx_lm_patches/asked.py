"""How many drafts a request asks for: its body's ``num_draft_tokens``, which upstream mixes with the command line's."""

from __future__ import annotations

from typing import Any, Literal

AUTO: Literal["auto"] = "auto"


class Asked(int):
    """A number that the body gave; upstream's default is a plain int. With `auto` the body said so, and the number is upstream's."""

    auto = False


def mark(handler: Any) -> None:
    """Have the number of upstream's handler, whose body is read and not yet checked, say whether it is the body's; let ``auto`` through."""
    if "num_draft_tokens" not in handler.body:
        return
    given = handler.num_draft_tokens
    if given == AUTO:
        handler.num_draft_tokens = Asked(handler.response_generator.cli_args.num_draft_tokens)
        handler.num_draft_tokens.auto = True
    elif isinstance(given, int):
        handler.num_draft_tokens = Asked(given)


def drafts(args: Any) -> int | Literal["auto"] | None:
    """What upstream's arguments of a request say; None where its body said nothing, or there is no request."""
    given = getattr(args, "num_draft_tokens", None)
    if not isinstance(given, Asked):
        return None
    return AUTO if given.auto else int(given)
