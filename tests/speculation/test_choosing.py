"""Which source of drafts a start chooses, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace

import assistants
import pytest

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_tiered.settings import Settings, add_arguments
from mlx_lm_tiered.speculation.artifacts import ASSISTANTS
from mlx_lm_tiered.speculation.assistant.config import KINDS
from mlx_lm_tiered.speculation.choose import choose
from support.models import ASSISTANT, TINY


LLAMA = str(TINY["llama"])


def start(
    speculation: str | None = None, tokens: int | str | None = None, draft_model: str | None = None,
    given: tuple[str, ...] = ("speculation", "draft_model", "num_draft_tokens"), command: str = "server",
) -> tuple[str, str | None, int | str | None]:  # fmt: skip
    """The source that is chosen, and what is left to mlx-lm: its draft model and number of tokens."""
    args = Namespace(draft_model=draft_model, num_draft_tokens=3 if tokens is None else tokens)
    values = {"speculation": speculation, "draft_model": draft_model, "num_draft_tokens": tokens}
    explicit = frozenset(name for name in given if values[name] is not None)
    chosen = choose(Settings(speculation=speculation, draft_model=draft_model, num_draft_tokens=tokens), Invocation(command, args, explicit))
    return chosen.source, args.draft_model, args.num_draft_tokens


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, ("off", None, 3)),
        ({"speculation": "ngram"}, ("ngram", None, 3)),
        ({"speculation": "ngram", "tokens": 64}, ("ngram", None, 64)),
        ({"speculation": "ngram", "tokens": "auto"}, ("ngram", None, 3)),
        ({"speculation": "ngram", "tokens": "auto", "command": "generate"}, ("ngram", None, 3)),
        ({"draft_model": LLAMA}, ("draft", None, 3)),
        ({"draft_model": LLAMA, "command": "generate"}, ("draft", None, 3)),
        ({"draft_model": LLAMA, "tokens": "auto"}, ("draft", None, 3)),
        ({"draft_model": LLAMA, "tokens": 5}, ("draft", None, 5)),
        ({"speculation": "off", "draft_model": LLAMA}, ("off", LLAMA, 3)),
        ({"speculation": "off", "draft_model": "nowhere", "tokens": 0}, ("off", "nowhere", 0)),
        # What comes from the environment gives way to a flag.
        ({"speculation": "ngram", "draft_model": LLAMA, "given": ("draft_model",)}, ("draft", None, 3)),
        ({"speculation": "ngram", "draft_model": "nowhere", "given": ("speculation",)}, ("ngram", "nowhere", 3)),
        ({"speculation": "ngram", "draft_model": LLAMA, "given": ()}, ("draft", None, 3)),
        ({"speculation": "off", "draft_model": LLAMA, "given": ("draft_model",)}, ("off", LLAMA, 3)),
        ({"tokens": "auto", "given": ()}, ("off", None, "auto")),
    ],
)
def test_what_can_be(given, chosen):
    assert start(**given) == chosen


@pytest.mark.parametrize("kind", ["tied", "unified"])
def test_an_assistant_is_known_by_its_configuration(kind, tmp_path):
    config = assistants.config(kind)
    assistants.write(tmp_path, config, assistants.tensors(kind))
    assert start(draft_model=str(tmp_path)) == ("assistant", None, 3)
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": None}))
    with pytest.raises(UsageError, match=f"--draft-model {tmp_path}: config.json has no text_config"):
        start(draft_model=str(tmp_path))


def test_the_kinds_of_assistants_are_those_that_are_read():
    assert sorted(ASSISTANTS) == sorted(KINDS)


def test_a_models_name_of_the_hub_is_where_mlx_lm_finds_it(monkeypatch):
    from mlx_lm import utils

    monkeypatch.setattr(utils, "_download", lambda name: {"owner/small": LLAMA}[name])
    chosen = choose(Settings(draft_model="owner/small"), Invocation("server", Namespace(draft_model="owner/small"), frozenset({"draft_model"})))
    assert chosen == ("draft", TINY["llama"].resolve())


@pytest.mark.parametrize("speculation", ["off", None])
def test_auto_needs_a_source_of_ours(speculation):
    with pytest.raises(UsageError, match="auto is for --speculation and --draft-model"):
        start(speculation, tokens="auto", draft_model=None if speculation is None else LLAMA)


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
        ({"speculation": "ngram", "draft_model": LLAMA}, "two sources of drafts"),
        ({"speculation": "ngram", "draft_model": LLAMA, "command": "generate"}, "two sources of drafts"),
        ({"speculation": "ngram", "tokens": 0}, "not between 1 and 64; leave --speculation out"),
        ({"speculation": "ngram", "tokens": 65}, "not between 1 and 64"),
        ({"speculation": "ngram", "tokens": 65, "command": "script"}, "not between 1 and 64"),
        ({"speculation": "ngram", "tokens": 65, "given": ()}, "not between 1 and 64"),
        ({"draft_model": LLAMA, "tokens": 0}, "not between 1 and 64; leave --draft-model out"),
        ({"draft_model": "/no/such/model"}, "--draft-model /no/such/model: there is no such directory"),
    ],
)
def test_what_contradicts_itself_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        start(**given)


@pytest.mark.parametrize("model", [TINY["llama"], ASSISTANT], ids=["model", "assistant"])
def test_choosing_imports_no_models_module(model):
    """One that is imported before the plugin's hooks are in place keeps mlx-lm's attention, and a KV scheme is off for it."""
    script = f"""
import sys, argparse
import mlx_lm.server
before = set(sys.modules)
from mlx_lm_hooks import Invocation
from mlx_lm_tiered.settings import Settings
from mlx_lm_tiered.speculation.choose import choose
from mlx_lm_tiered.runtime import Runtime
settings = Settings(draft_model={str(model)!r})
drafting = choose(settings, Invocation("server", argparse.Namespace(draft_model={str(model)!r}), frozenset({{"draft_model"}})))
assert drafting.path is not None
from mlx_lm_tiered.speculation.assistant.source import AssistantSource
from mlx_lm_tiered.speculation.draft_model import DraftModelSource
(AssistantSource if drafting.source == "assistant" else DraftModelSource)(drafting.path)
print([name for name in set(sys.modules) - before if name.startswith("mlx_lm.models.")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
