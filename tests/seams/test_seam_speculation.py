"""The seam of a row alone in its batch: when a plugin is asked, what it is shown, and what comes of its faults."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest
from mlx_lm import load
from witness import Witness

from mlx_lm_hooks import Invocation, Refused
from mlx_lm_patches import admitting, asked
from mlx_lm_patches.host import host
from mlx_lm_patches.runtime import Fetch, Runtime
from support.models import TINY

PROMPTS = [list(range(20, 40)), list(range(30, 70))]


class Notes:
    """A `Speculation`, and each request's `Speculator`, that drafts nothing, or fails, and notes what it is shown."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.shown: list[tuple[int, int, int]] = []
        self.fails = ""
        self.ended = 0

    def model_loaded(self, model) -> None:
        raise AssertionError("no server loads a model here")

    def begin(self, model, row):
        self.begun.append(list(row.tokens))
        if self.fails == "begin":
            raise RuntimeError("the witness fails on purpose")
        return self

    def advance(self, row) -> bool:
        assert row.together and len(row.caches) > 0
        self.shown.append((len(row.tokens), row.pending, row.room))
        return False

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def notes():
    plugin = Witness()
    plugin.speculation = Notes()
    host.activate(plugin.plugins(), Invocation("script", argparse.Namespace()))
    yield plugin.speculation
    host.deactivate()


def answers(model, prompts, most: int) -> dict[int, list[int]]:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model)
    uids = generator.insert(prompts, max_tokens=[most - 3 * number for number in range(len(prompts))])
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    left = len(uids)
    while left:
        for response in generator.next()[1]:
            found[response.uid].append(response.token)
            left -= response.finish_reason is not None
    generator.close()
    return found


def test_it_is_shown_a_row_between_two_tokens(notes):
    model, _ = load(str(TINY["llama"]))
    (answer,) = answers(model, PROMPTS[:1], 8).values()
    assert notes.begun == [PROMPTS[0]]
    assert notes.shown == [(len(PROMPTS[0]) + place, token, 7 - place) for place, token in enumerate(answer)]
    assert notes.ended == 1


def test_it_is_not_asked_while_there_are_two(notes):
    model, _ = load(str(TINY["llama"]))
    longer, shorter = answers(model, PROMPTS, 8).values()
    assert (len(longer), len(shorter)) == (8, 5)
    assert notes.begun == [PROMPTS[0] + longer[:5]]
    assert [held for held, _, _ in notes.shown] == [len(PROMPTS[0]) + place for place in (5, 6, 7)]


def test_a_fault_leaves_the_row_to_upstream(notes, caplog):
    model, _ = load(str(TINY["llama"]))
    expected = answers(model, PROMPTS[:1], 8)
    notes.fails = "begin"
    assert answers(model, PROMPTS[:1], 8) == expected
    assert len(notes.begun) == 2 and caplog.text.count("plugin fault in beginning to speculate") == 1


def test_what_an_ended_request_leaves_is_kept_after_its_generation_was_closed(monkeypatch):
    """Until then its caches may hold tokens that were not handed out."""
    order = []

    def steps():
        try:
            while True:
                yield argparse.Namespace(token=1)
        finally:
            order.append("closed")

    monkeypatch.setattr(admitting, "_stopping", lambda runtime, rows: Refused(503, "no memory"))
    monkeypatch.setattr(admitting, "_keep", lambda runtime, fetch, tokens, caches: order.append(tokens))
    runtime = Runtime(Witness().plugins(), Invocation("server", argparse.Namespace()))
    fetch = Fetch(None, None, [5, 6], 2, 0)
    with pytest.raises(Refused):
        list(admitting.watch_one(runtime, fetch, {"prompt": [5, 6], "prompt_cache": [], "max_tokens": 9}, steps()))
    assert order == ["closed", [5, 6, 1]]


def test_the_memory_guard_is_asked_after_as_many_tokens_however_many_a_step_gives():
    watch, response = admitting.Watch(None), argparse.Namespace(uid=3)
    asked = [watch.due([], [response] * 8) for _ in range(64)]
    assert [number for number, due in enumerate(asked, 1) if due] == [32, 64]
    together = [response, argparse.Namespace(uid=4)]
    assert [watch.due([], together) for _ in range(256)].index(True) == 255


@pytest.mark.parametrize(("body", "says"), [({}, None), ({"num_draft_tokens": 3}, 3), ({"num_draft_tokens": 0}, 0), ({"num_draft_tokens": "auto"}, "auto")])
def test_a_bodys_number_is_told_from_upstreams_default(body, says):
    """Also where it was copied, or went to another rank of a distributed server."""
    handler = argparse.Namespace(body=body, response_generator=argparse.Namespace(cli_args=argparse.Namespace(num_draft_tokens=3)))
    handler.num_draft_tokens = body.get("num_draft_tokens", 3)
    asked.mark(handler)
    args = argparse.Namespace(num_draft_tokens=handler.num_draft_tokens)
    assert isinstance(args.num_draft_tokens, int)
    for one in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert asked.drafts(one) == says
    assert asked.drafts(None) is None


def test_what_is_no_number_is_left_to_upstream():
    handler = argparse.Namespace(body={"num_draft_tokens": "some"}, num_draft_tokens="some")
    asked.mark(handler)
    assert handler.num_draft_tokens == "some"
