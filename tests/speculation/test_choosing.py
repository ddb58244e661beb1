"""Which settings of speculation a start refuses."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_tiered.speculation.choose import check


def start(speculation: str = "ngram", tokens: int | None = None, command: str = "server", draft_model: str | None = None, given: bool = True) -> None:
    check(speculation, tokens, Invocation(command, Namespace(draft_model=draft_model), frozenset({"speculation"} if given else ())))


def test_what_can_be():
    start()
    start(tokens=1)
    start(tokens=64)
    start("off", tokens=0, draft_model="small")
    start(draft_model="small", tokens=0, given=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"draft_model": "small"}, "two sources of drafts"),
        ({"tokens": 0}, "not between 1 and 64"),
        ({"tokens": 65}, "not between 1 and 64"),
        ({"tokens": 65, "command": "script"}, "not between 1 and 64"),
        ({"tokens": 65, "given": False}, "not between 1 and 64"),
        ({"draft_model": "small", "command": "generate"}, "two sources of drafts"),
    ],
)
def test_what_contradicts_itself_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        start(**given)
