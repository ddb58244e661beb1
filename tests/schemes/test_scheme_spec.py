"""What a scheme's text means, and the sentence for each that means nothing."""

from __future__ import annotations

import argparse
import json

import pytest

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_tiered.schemes.choose import choose
from mlx_lm_tiered.schemes.scheme import Scheme
from mlx_lm_tiered.schemes.spec import PLAIN, Affine, Spec, Turbo, parse
from mlx_lm_tiered.statistics import Statistics
from support.models import TINY


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("bf16", PLAIN, "bf16"),
        ("affine:4", Spec(Affine(4, 64)), "affine:4:64@0"),
        ("affine:8:32@2048", Spec(Affine(8, 32), 2048), "affine:8:32@2048"),
        ("affine:3@7", Spec(Affine(3, 64), 7), "affine:3:64@7"),
        ("config", Spec(config=True), "config"),
        ("turbo", Spec(Turbo(8, 3)), "turbo:k8v3@0"),
        ("turbo@64", Spec(Turbo(8, 3), 64), "turbo:k8v3@64"),
        ("turbo:k4v2@7", Spec(Turbo(4, 2), 7), "turbo:k4v2@7"),
    ],
)
def test_meanings(text, spec, canonical):
    assert parse(text) == spec and str(spec) == canonical and parse(canonical) == spec
    assert spec.plain == (text == "bf16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("turboquant:8:3", "write it like turbo, turbo:k8v4 or turbo:k8v3@2048"),
        ("turbo:", "write it like turbo"),
        ("turbo:k8", "write it like turbo"),
        ("turbo:k3v3", "keys in 3 bits are not possible; use 2, 4, 5 or 8"),
        ("turbo:k8v6", "values in 6 bits are not possible; use 2, 3, 4, 5 or 8"),
        ("affine", "write it like affine:4"),
        ("affine:4:64:1", "write it like affine:4"),
        ("affine:7", "7 bits are not possible; use 2, 3, 4, 5, 6 or 8"),
        ("affine:4:48", "groups of 48 are not possible; use 32, 64 or 128"),
        ("config:", "followed by no path"),
        ("bf16:4", "not a scheme"),
        ("int4", "not a scheme"),
    ],
)
def test_sentences(text, says):
    with pytest.raises(ValueError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def started(asked=None, given=(), **args):
    defaults = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000, "draft_model": None, "model": None}
    return Invocation("server", argparse.Namespace(**{**defaults, **args}), frozenset([*args, *given]))


def test_upstreams_flags_mean_the_affine_scheme():
    invocation = started(kv_bits=4, kv_group_size=32)
    assert choose(None, invocation) == Spec(Affine(4, 32), 5000)
    assert invocation.args.kv_bits is None, "upstream would turn its batches off"
    assert choose(None, started()) == PLAIN
    assert choose(parse("affine:8"), started()) == parse("affine:8")
    # A flag beats the environment.
    assert choose(parse("affine:8"), started(kv_bits=4)) == Spec(Affine(4, 64), 5000)


@pytest.mark.parametrize(
    ("asked", "invocation", "says"),
    [
        ("affine:4", started(given=["kv_scheme"], kv_bits=4), "--kv-scheme affine:4:64@0 and --kv-bits both say"),
        ("bf16", started(given=["kv_scheme"], kv_group_size=32), "and --kv-group-size both say"),
        (None, started(kv_bits=7), "--kv-bits 7 .*7 bits are not possible"),
        (None, started(kv_bits=4, draft_model="d"), "with --draft-model cannot begin at token 5000.*--quantized-kv-start 0"),
        ("affine:4@9", started(draft_model="d"), "with --draft-model .* use affine:4:64"),
        ("turbo@9", started(draft_model="d"), "with --draft-model .* use turbo:k8v3"),
        ("turbo", started(model=str(TINY["llama"])), "layer 0: heads of 32 have no TurboQuant form; it is for 64, 128, 256 or 512"),
        ("affine:4:64", started(model=str(TINY["llama"])), "layer 0: heads of 32 cannot be cut into groups of 64; use 32"),
        ("config", started(model=str(TINY["llama"])), "kv_config.json cannot be read"),
    ],
)
def test_contradictions_end_the_start(asked, invocation, says):
    with pytest.raises(UsageError, match=says) as caught:
        choose(asked and parse(asked), invocation)
    assert "\n" not in str(caught.value)


GOOD = {"layer_idx": 1, "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ({}, "is not a list"),
        ([{"bits": 4}], "entry 0 has no layer_idx"),
        ([GOOD, GOOD], "layer 1 is listed twice"),
        ([{**GOOD, "layer_idx": 3}], "layer 3 is out of range: model has KV for layers 0 to 2"),
        ([{**GOOD, "layer_idx": -1}], "layer -1 is out of range"),
        ([{**GOOD, "bits": 7}], "layer 1: 7 bits are not possible"),
        ([{**GOOD, "group_size": 48}], "layer 1: groups of 48"),
        ([{**GOOD, "group_size": 128}], "layer 1: heads of 32 cannot be cut into groups of 128"),
        ([{**GOOD, "mode": "x"}], "layer 1 has a field 'mode'"),
        ([{"layer_idx": 1, "bits": 4}], "layer 1 has no group_size"),
    ],
)
def test_a_config_that_cannot_be_names_the_layer(tmp_path, content, says):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((TINY["llama"] / "config.json").read_text())
    (folder / "kv_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=says):
        choose(parse("config"), started(model=str(folder)))
    named = folder / "kv_config.json"
    if "heads" not in says and "range" not in says:
        with pytest.raises(UsageError, match=says):
            choose(parse(f"config:{named}"), started())


def test_layers_that_read_others_have_no_scheme_of_their_own(tmp_path):
    """Gemma 4's last layers share KV: 6 layers, 4 caches."""
    text = json.loads((TINY["gemma4_text"] / "config.json").read_text())
    caches = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    (tmp_path / "kv_config.json").write_text(json.dumps([{**GOOD, "layer_idx": caches}]))
    with pytest.raises(UsageError, match=f"layer {caches} is out of range: .* has KV for layers 0 to {caches - 1}"):
        choose(parse("config"), started(model=str(tmp_path)))


def written(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return started(model=str(folder))


def test_heads_that_a_configuration_leaves_to_mlx_lm_are_its_own(tmp_path):
    """Gemma 3 12B: 3840 / 16 is no whole group, but its heads are of 256."""
    text = {"model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_hidden_layers": 48}
    assert choose(parse("affine:4:128"), written(tmp_path, model_type="gemma3", text_config=text)) == parse("affine:4:128")
    with pytest.raises(UsageError, match="layer 0: heads of 240 cannot be cut into groups of 64"):
        choose(parse("affine:4"), written(tmp_path, **text | {"model_type": "llama"}))
    with pytest.raises(UsageError, match="layer 0: heads of 240 cannot be cut"):
        choose(parse("affine:4"), written(tmp_path, **text | {"model_type": "../llama"}))


def test_layers_with_other_heads_are_named(tmp_path):
    """Gemma 4: windows have heads of 32 here, full attention of 64."""
    config = json.loads((TINY["gemma4_text"] / "config.json").read_text())
    assert config["layer_types"][1] == "full_attention" and choose(parse("affine:4:32"), written(tmp_path, **config))
    with pytest.raises(UsageError, match="layer 0: heads of 32 cannot be cut into groups of 64"):
        choose(parse("affine:4:64"), written(tmp_path, **config))
    with pytest.raises(UsageError, match="layer 1: heads of 64 cannot be cut into groups of 128"):
        choose(parse("affine:4:128"), written(tmp_path, **config | {"head_dim": 128}))
    untold = {name: value for name, value in config.items() if name != "layer_types"}
    assert choose(parse("affine:4:64"), written(tmp_path, **untold)), "the first run will show"


def test_a_config_that_changes_while_it_serves_changes_nothing(tmp_path):
    """Else what is stored from now on would be named after layers that the caches do not have."""
    (tmp_path / "kv_config.json").write_text(json.dumps([GOOD]))
    scheme, after = (Scheme(parse("config"), Statistics()) for _ in range(2))
    before = scheme.name(tmp_path)
    (tmp_path / "kv_config.json").write_text(json.dumps([{**GOOD, "bits": 8}]))
    assert scheme.name(tmp_path) == before != after.name(tmp_path)
    assert before.startswith("config:") and Scheme(parse("config"), Statistics()).name(tmp_path) == after.name(tmp_path)


@pytest.mark.parametrize(
    ("text", "dim", "per_token"),
    [("turbo", 128, 200), ("turbo:k8v4", 128, 216), ("turbo:k5v3", 128, 152), ("turbo:k4v3", 128, 136), ("affine:8:64", 128, 272), ("affine:4:64", 128, 144), ("turbo", 64, 100)],
)  # fmt: skip
def test_bytes_of_a_token(text, dim, per_token):
    form = parse(text).form
    assert form is not None and form.nbytes(dim, dim, 2) == per_token


def test_stored_kv_of_other_code_books_is_another_models():
    assert Scheme(parse("turbo@64"), Statistics()).name(None) == "turbo-k8v3.1@64"
    assert Scheme(parse("affine:4"), Statistics()).name(None) == "affine:4:64@0"
