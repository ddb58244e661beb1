"""The assistant's module against Hugging Face transformers' `Gemma4AssistantForCausalLM`, whose outputs `golden/make_assistant_golden.py` has written down."""

from __future__ import annotations

from pathlib import Path

import assistants
import mlx.core as mx
import pytest

from mlx_lm_tiered.speculation.assistant.artifact import load

GOLDEN = mx.load(str(Path(__file__).parent / "golden" / "assistant.safetensors"))
CASES = sorted({name.rsplit(".", 2)[0] for name in GOLDEN})
CLOSE = 1e-5


@pytest.fixture(scope="module")
def assistant_of(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = load(assistants.write(tmp_path_factory.mktemp(kind), assistants.config(kind), assistants.tensors(kind)))
        return made[kind]

    return of


def test_every_kind_is_there_below_and_beyond_the_window():
    assert CASES == sorted(f"{kind}.{tokens}.{form}" for kind in assistants.KINDS for tokens in (5, 40) for form in ("cut", "whole"))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_next_hidden_are_transformers(case, assistant_of):
    """transformers is given the newest window of sliding keys, which it attends to all, or the whole of them, of which its own mask leaves one more than a window."""
    kind, tokens, form = case.split(".")
    assistant, position = assistant_of(kind), int(tokens)
    window = assistants.WINDOW + (form == "whole")
    kv = {
        name: tuple(mx.array(side[:, :, -window:] if name == "sliding_attention" else side) for side in pair)
        for name, pair in assistants.borrowed(kind, position).items()
    }
    first, hidden, second = map(mx.array, assistants.inputs())
    for draft, embedded in enumerate((first, second)):
        logits, following = assistant(embedded, hidden, kv, position)
        golden, hidden = (GOLDEN[f"{case}.{draft}.{name}"] for name in ("logits", "hidden"))
        assert logits.shape == golden.shape and following.shape == hidden.shape
        assert mx.abs(logits - golden).max() < CLOSE
        assert mx.abs(following - hidden).max() < CLOSE
