"""An assistant and a model that do not belong together, and what is said of it."""

from __future__ import annotations

from typing import Any

import assistants
import pytest
from mlx_lm.models import gemma4, gemma4_text, llama

from mlx_lm_tiered.speculation.assistant import config as configuration
from mlx_lm_tiered.speculation.assistant.model import AssistantModel
from mlx_lm_tiered.speculation.assistant.pairing import NotAPair, check, lending_layer


def settings(**changes: Any) -> dict[str, Any]:
    """A target's: six layers, the last three of which share; two KV heads, one on full layers."""
    return {
        "model_type": "gemma4_text",
        "hidden_size": assistants.H,
        "num_hidden_layers": 6,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size": assistants.V,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **changes,
    }


def target(**changes: Any) -> gemma4_text.Model:
    return gemma4_text.Model(gemma4_text.ModelArgs.from_dict(settings(**changes)))


@pytest.fixture
def assistant(tmp_path):
    assistants.write(tmp_path, assistants.config("unified"), assistants.tensors("unified"))
    return AssistantModel(configuration.read(tmp_path), centroid_head=False)


def test_a_pair_is_one_wrapped_or_not(assistant):
    check(assistant, target())
    check(assistant, gemma4.Model(gemma4.ModelArgs(text_config=settings(), vocab_size=assistants.V)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "hidden size of 48; this one has 64"),
        ({"vocab_size": 128}, "vocabulary of 64 tokens; the model has 128"),
        ({"head_dim": 32}, "sliding_attention layers have heads of 16 numbers; the model's have 32"),
        ({"global_head_dim": 16}, "full_attention layers have heads of 32 numbers; the model's have 16"),
        ({"num_key_value_heads": 4}, "sliding_attention layers expect 2 KV heads; the model's have 4"),
        ({"attention_k_eq_v": False}, "full_attention layers expect 1 KV heads; the model's have 2"),
        ({"layer_types": ["sliding_attention"] * 6}, "has layers of full_attention; the model has none"),
        ({"layer_types": ["full_attention"] * 6}, "has layers of sliding_attention; the model has none"),
    ],
)
def test_what_differs_is_named(assistant, changes, said):
    with pytest.raises(NotAPair, match=said):
        check(assistant, target(**changes))


def test_a_type_of_which_all_layers_share_is_missing(assistant):
    model = target()
    # mlx-lm makes no such model: nothing could be shared.
    model.args.num_kv_shared_layers = 4
    with pytest.raises(NotAPair, match="has layers of full_attention; the model has none with keys and values of its own"):
        check(assistant, model)


def test_other_models_are_none(assistant):
    model = llama.Model(llama.ModelArgs("llama", 48, 1, 64, 4, 1e-6, 64))
    with pytest.raises(NotAPair, match="is for a Gemma 4 model; this one is llama"):
        check(assistant, model)


def test_the_lending_layer_is_the_last_one_that_does_not_share():
    assert lending_layer(target(), "sliding_attention") == 1
    assert lending_layer(target(), "full_attention") == 2
    assert lending_layer(target(num_kv_shared_layers=0), "sliding_attention") == 4
    assert lending_layer(target(layer_types=["sliding_attention"] * 6), "full_attention") is None
