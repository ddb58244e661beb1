"""Which settings of speculation a start refuses."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import pytest

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_tiered.settings import add_arguments
from mlx_lm_tiered.speculation.choose import check


def start(speculation: str = "ngram", tokens: int | None = None, command: str = "server", draft_model: str | None = None, given: bool = True) -> None:
    check(speculation, tokens, Invocation(command, Namespace(draft_model=draft_model), frozenset({"speculation"} if given else ())))


def test_what_can_be():
    start()
    start(tokens=1)
    start(tokens=64)
    start("off", tokens=0, draft_model="small")
    start(draft_model="small", tokens=0, given=False)
    start(tokens="auto")
    start("off", tokens="auto", given=False)  # the environment's


def test_upstream_is_left_a_number():
    for command in ("server", "generate"):
        args = Namespace(draft_model=None, num_draft_tokens="auto")
        check("ngram", "auto", Invocation(command, args, frozenset({"speculation", "num_draft_tokens"})))
        assert args.num_draft_tokens == 3


@pytest.mark.parametrize(("speculation", "model"), [("off", None), ("off", "small")])
def test_auto_needs_a_source_of_ours(speculation, model):
    with pytest.raises(UsageError, match="auto is for --speculation"):
        check(speculation, "auto", Invocation("server", Namespace(draft_model=model, num_draft_tokens="auto"), frozenset({"num_draft_tokens"})))


def test_upstreams_own_flag_takes_auto_and_numbers():
    for command in ("server", "generate"):
        parser = ArgumentParser()
        parser.add_argument("--num-draft-tokens", type=int, default=3)
        add_arguments(parser.add_argument_group("plugin"), command)
        values = [parser.parse_args(given).num_draft_tokens for given in ([], ["--num-draft-tokens", "auto"], ["--num-draft-tokens", "5"])]
        assert values == [3, "auto", 5]
        with pytest.raises(SystemExit):
            parser.parse_args(["--num-draft-tokens", "some"])


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
