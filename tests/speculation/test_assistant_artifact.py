"""Artifacts of assistants: every tensor checked, one file or several, quantized or not, and what is wrong with a bad one is said."""

from __future__ import annotations

import json
import re
import struct

import assistants
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from mlx_lm_tiered.speculation.artifacts import ASSISTANTS
from mlx_lm_tiered.speculation.assistant.artifact import BadArtifact, load
from mlx_lm_tiered.speculation.assistant.config import KINDS
from mlx_lm_tiered.speculation.assistant.config import Heads

TOKENS = 12


def outputs(assistant, kind):
    embedded, hidden, _ = map(mx.array, assistants.inputs())
    kv = {name: tuple(mx.array(side) for side in pair) for name, pair in assistants.borrowed(kind, TOKENS).items()}
    return assistant(embedded, hidden, kv, TOKENS)


def same(first, second, kind):
    return all(mx.array_equal(a, b) for a, b in zip(outputs(first, kind), outputs(second, kind), strict=True))


@pytest.fixture(params=["centroid", "unified"])
def kind(request):
    return request.param


@pytest.fixture
def parts(kind):
    """A config.json and the weights."""
    return assistants.config(kind), assistants.tensors(kind)


def test_what_is_an_assistant():
    assert {assistants.config(kind)["model_type"] for kind in assistants.KINDS} == set(ASSISTANTS) == set(KINDS)


def test_each_missing_or_misshapen_tensor_is_named(tmp_path, parts):
    settings, weights = parts
    for name in weights:
        without = {other: value for other, value in weights.items() if other != name}
        longer = {**weights, name: np.concatenate([weights[name], weights[name][:1]])}
        for wrong in (without, longer):
            with pytest.raises(BadArtifact, match=re.escape(name)):
                load(assistants.write(tmp_path / "bad", settings, wrong))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extra": np.zeros(3, np.float32)}, "the tensor extra belongs to no assistant"),
        ({"pre_projection.bias": np.zeros(assistants.D, np.float32)}, "pre_projection.bias belongs to no assistant"),
        ({"model.norm.weight": np.zeros(assistants.D, np.int32)}, "model.norm.weight has the type I32"),
        ({"model.norm.weight": np.zeros(assistants.D, np.float64)}, "model.norm.weight has the type F64"),
        ({"masked_embedding.token_ordering": np.zeros(assistants.V, np.int64)}, "does not name each token once"),
        ({"masked_embedding.token_ordering": np.arange(1, assistants.V + 1)}, "does not name each token once"),
        ({"masked_embedding.token_ordering": np.arange(assistants.V) - 2**40}, "does not name each token once"),
        ({"masked_embedding.token_ordering": np.zeros(assistants.V, np.float32)}, "token_ordering has the type F32"),
        ({"pre_projection.scales": np.zeros((assistants.D, 2), np.float32)}, "are not the tensors of a quantized matrix"),
    ],
)
def test_other_tensors_that_are_wrong(tmp_path, change, said):
    with pytest.raises(BadArtifact, match=re.escape(said)):
        load(assistants.write(tmp_path, assistants.config("centroid"), {**assistants.tensors("centroid"), **change}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 2**40}, "text_config.hidden_size is 1099511627776, not an integer from 1 to"),
        ({"hidden_size": 2**20}, "has the shape [64, 32], not [64, 1048576]"),
        ({"hidden_size": 0}, "text_config.hidden_size is 0"),
        ({"hidden_size": 32.0}, "text_config.hidden_size is 32.0"),
        ({"hidden_size": True}, "text_config.hidden_size is True"),
        ({"vocab_size": 2**24}, "model.embed_tokens.weight has the shape [64, 32]"),
        ({"num_hidden_layers": 10**9}, "text_config.num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 5}, "text_config.layer_types is not a list of 5"),
        ({"num_hidden_layers": 5, "layer_types": [*assistants.LAYERS, "full_attention"]}, "the assistant lacks the tensor model.layers.4."),
        ({"layer_types": ["full_attention"] * 3 + ["other"]}, "text_config.layer_types is not"),
        ({"head_dim": 15}, "heads of sliding_attention layers have 15 numbers"),
        ({"global_head_dim": 2**24}, "has the shape [128, 32], not [67108864, 32]"),
        ({"num_key_value_heads": 3}, "which 3 KV heads of sliding_attention layers do not divide"),
        ({"rms_norm_eps": -1}, "text_config.rms_norm_eps is -1, not a number above 0"),
        ({"rope_parameters": [1]}, "text_config.rope_parameters has no object for"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention.rope_type is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}}, "partial_rotary_factor is 1.5, not a number above 0 and up to 1"),
        ({"hidden_activation": "relu"}, "text_config.hidden_activation is 'relu'"),
        ({"enable_moe_block": True}, "assistants have no experts"),
        ({"per_layer_config": 3}, "per_layer_config is no object"),
        ({"per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 8}}}, "per_layer_config gives sliding_attention layers different heads"),
    ],
)
def test_configurations_that_are_wrong(tmp_path, change, said):
    with pytest.raises(BadArtifact, match=re.escape(said)):
        load(assistants.write(tmp_path, assistants.config("centroid", **change), assistants.tensors("centroid")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama', which is no assistant's"),
        ({"text_config": None}, "has no text_config"),
        ({"backbone_hidden_size": "x"}, "config.json.backbone_hidden_size is x"),
        ({"num_centroids": 7}, "num_centroids (7) does not divide its vocabulary (64)"),
        ({"num_centroids": 16}, "masked_embedding.centroids.weight has the shape [8, 32], not [16, 32]"),
        ({"centroid_intermediate_top_k": 9}, "centroid_intermediate_top_k (9) is not from 1 to"),
    ],
)
def test_configurations_that_are_wrong_at_the_top(tmp_path, change, said):
    with pytest.raises(BadArtifact, match=re.escape(said)):
        load(assistants.write(tmp_path, {**assistants.config("centroid"), **change}, assistants.tensors("centroid")))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100000, '"' + "x" * 5 * 2**20 + '"'], ids=["empty", "list", "open", "deep", "long"])
def test_a_configuration_that_is_no_json(tmp_path, text):
    assistants.write(tmp_path, {}, assistants.tensors("tied"))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadArtifact, match=r"^config\.json is "):
        load(tmp_path)


def test_files_that_are_missing_or_cut_or_lie(tmp_path, parts):
    assistants.write(tmp_path, *parts)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for wrong in (whole[:-4], whole[:100], b"", struct.pack("<Q", 2**60) + whole[8:]):
        weights.write_bytes(wrong)
        with pytest.raises(BadArtifact, match="model.safetensors cannot be read"):
            load(tmp_path)
    weights.unlink()
    with pytest.raises(BadArtifact, match=r"has no model\*.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadArtifact, match="config.json cannot be read"):
        load(tmp_path)


def test_the_heads_tensors_decide_not_the_configuration(tmp_path):
    """Unified artifacts declare centroids and have none; others could have them and not declare it."""
    unified = load(assistants.write(tmp_path / "unified", assistants.config("unified"), assistants.tensors("unified")))
    for absurd in ({"num_centroids": -5, "centroid_intermediate_top_k": "x"}, {"use_ordered_embeddings": True}):
        settings = {**assistants.config("unified"), **absurd}
        assert same(unified, load(assistants.write(tmp_path / "absurd", settings, assistants.tensors("unified"))), "unified")
    settings, weights = assistants.config("centroid"), assistants.tensors("centroid")
    centroid = load(assistants.write(tmp_path / "centroid", settings, weights))
    undeclared = load(assistants.write(tmp_path / "undeclared", {**settings, "use_ordered_embeddings": False}, weights))
    assert unified.masked_embedding is None and centroid.masked_embedding is not None
    assert same(centroid, undeclared, "centroid")


def test_a_head_of_its_own_takes_the_place_of_the_embeddings(tmp_path, parts, kind):
    settings, weights = parts
    head = np.random.default_rng(8).normal(size=(assistants.V, assistants.D)).astype(np.float32)
    own = load(assistants.write(tmp_path / "own", settings, {**weights, "lm_head.weight": head}))
    assert same(own, load(assistants.write(tmp_path / "other", settings, {**weights, "model.embed_tokens.weight": head})), kind)
    assert not same(own, load(assistants.write(tmp_path / "tied", settings, weights)), kind)


def test_several_files_are_as_one(tmp_path, parts, kind):
    settings, weights = parts
    single = load(assistants.write(tmp_path / "single", settings, weights))
    several = assistants.write(tmp_path / "several", settings, {})
    (several / "model.safetensors").unlink()
    names = sorted(weights)
    for number in range(3):
        save_file({name: weights[name] for name in names[number::3]}, str(several / f"model-0000{number + 1}-of-00003.safetensors"))
    assert same(single, load(several), kind)
    places = {name: f"model-0000{place % 3 + 1}-of-00003.safetensors" for place, name in enumerate(names)}
    index = several / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert same(single, load(several), kind)
    # What the index does not name is not read.
    save_file(weights, str(several / "model-old.safetensors"))
    assert same(single, load(several), kind)
    index.unlink()
    with pytest.raises(BadArtifact, match=r"is in model-.*\.safetensors and in model-"):
        load(several)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", 3, None])
def test_an_index_names_only_files_of_weights_beside_it(tmp_path, name):
    assistants.write(tmp_path / "inside", assistants.config("tied"), assistants.tensors("tied"))
    index = tmp_path / "inside" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(BadArtifact, match="which is no file of weights beside it"):
        load(tmp_path / "inside")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    with pytest.raises(BadArtifact, match=r"model-1\.safetensors is missing"):
        load(tmp_path / "inside")


def quantized(directory, settings, weights, forms):
    """What `mlx_lm.convert` makes of an artifact: `forms` has, by path, how a matrix is quantized. Also the artifact with the rounded weights."""
    packed, rounded = {}, {}
    for name, value in weights.items():
        form = forms(name.removesuffix(".weight")) if value.ndim == 2 else None
        if form is None:
            packed[name] = rounded[name] = mx.array(value)
            continue
        arrays = mx.quantize(mx.array(value), **form)
        for part, array in zip(("weight", "scales", "biases"), arrays, strict=False):
            packed[f"{name.removesuffix('weight')}{part}"] = array
        rounded[name] = mx.dequantize(*arrays, **form, dtype=mx.float32)
    for place, arrays in (("packed", packed), ("rounded", rounded)):
        assistants.write(directory / place, settings, {})
        mx.save_safetensors(str(directory / place / "model.safetensors"), arrays)
    return load(directory / "packed"), load(directory / "rounded")


@pytest.mark.parametrize(
    "form",
    [{"bits": 4, "group_size": 32, "mode": "affine"}, {"bits": 8, "group_size": 32, "mode": "affine"}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}],
    ids=["4 bits", "8 bits", "mxfp4"],
)
def test_a_quantized_artifact_has_the_rounded_weights_logits(tmp_path, monkeypatch, kind, form):
    monkeypatch.setattr(assistants, "MLP", 64)
    weights = assistants.tensors(kind)
    packed, rounded = quantized(tmp_path, {**assistants.config(kind, intermediate_size=64), "quantization": form}, weights, lambda path: form)
    layers = [module for _, module in packed.named_modules() if hasattr(module, "bits")]
    assert len(layers) == sum(value.ndim == 2 for value in weights.values())
    for first, second in zip(outputs(packed, kind), outputs(rounded, kind), strict=True):
        assert mx.abs(first - second).max() < 1e-4
    embed = mx.random.normal((assistants.V, assistants.H), key=mx.random.key(2))
    kv = {name: tuple(mx.array(side) for side in pair) for name, pair in assistants.borrowed(kind, TOKENS).items()}
    drafts = (model.greedy(lambda tokens: embed[tokens], 3, mx.ones((1, 1, assistants.H)), kv, TOKENS, 4, False) for model in (packed, rounded))
    assert mx.array_equal(*drafts)


def test_layers_are_quantized_each_in_its_own_way(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(assistants, "MLP", 64)
    eight, four = {"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 32}

    def form(path):
        return eight if path.startswith("model.embed") else None if path == "pre_projection" else four

    settings = assistants.config(kind, intermediate_size=64)
    settings["quantization"] = {**four, "model.embed_tokens": eight, "pre_projection": False}
    packed, rounded = quantized(tmp_path, settings, assistants.tensors(kind), form)
    assert packed.model.embed_tokens.bits == 8 and packed.post_projection.bits == 4 and type(packed.pre_projection) is nn.Linear
    for first, second in zip(outputs(packed, kind), outputs(rounded, kind), strict=True):
        assert mx.abs(first - second).max() < 1e-4


def test_what_mlx_lm_itself_quantizes_is_read(tmp_path, monkeypatch):
    from mlx_lm.utils import quantize_model

    monkeypatch.setattr(assistants, "MLP", 64)
    settings = assistants.config("centroid", intermediate_size=64)
    model = load(assistants.write(tmp_path / "whole", settings, assistants.tensors("centroid")))
    model, made = quantize_model(model, settings, 32, 4)
    assistants.write(tmp_path / "packed", made, {})
    mx.save_safetensors(str(tmp_path / "packed" / "model.safetensors"), dict(tree_flatten(model.parameters())))
    assert same(model, load(tmp_path / "packed"), "centroid")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pre_projection.scales", np.zeros((assistants.D, 5), np.float32), "is quantized to shapes [32, 12] and [32, 5] (F32), which is no format"),
        ("pre_projection.scales", np.zeros((assistants.D + 1, 3), np.float32), "and [33, 3] (F32), which is no format"),
        ("pre_projection.weight", np.zeros((assistants.D, 13), np.uint32), "is quantized to shapes [32, 13]"),
        ("pre_projection.weight", np.zeros((assistants.D, 12), np.int32), "are not the tensors of a quantized matrix"),
        ("pre_projection.biases", None, "the assistant lacks the tensor pre_projection.biases"),
        ("pre_projection.biases", np.zeros((assistants.D, 1), np.float32), "pre_projection.biases has the shape [32, 1]"),
    ],
)
def test_quantized_tensors_that_are_wrong(tmp_path, name, value, said):
    weights = assistants.tensors("centroid")
    for part, array in zip(("weight", "scales", "biases"), mx.quantize(mx.array(weights["pre_projection.weight"]), group_size=32, bits=4), strict=True):
        weights[f"pre_projection.{part}"] = np.array(array)
    load(assistants.write(tmp_path, assistants.config("centroid"), weights))
    weights[name] = value
    with pytest.raises(BadArtifact, match=re.escape(said)):
        load(assistants.write(tmp_path, assistants.config("centroid"), {name: value for name, value in weights.items() if value is not None}))


def test_what_no_shared_layer_reads_is_left_alone(tmp_path, parts, kind):
    settings, weights = parts
    more = {"model.layers.0.self_attn.k_proj.weight": np.zeros((4, 4), np.float32), "model.layers.3.self_attn.k_norm.weight": np.zeros(4, np.float32)}
    assert same(load(assistants.write(tmp_path / "a", settings, weights)), load(assistants.write(tmp_path / "b", settings, {**weights, **more})), kind)


def test_defaults_are_transformers(tmp_path):
    """Of what a config.json leaves out."""
    from mlx_lm_tiered.speculation.assistant.config import read

    for kind, backbone, window in (("gemma4_assistant", 1536, 512), ("gemma4_unified_assistant", 3840, 1024)):
        assistants.write(tmp_path, {"model_type": kind, "text_config": {"num_hidden_layers": 4}}, {})
        config = read(tmp_path)
        assert (config.backbone_hidden_size, config.num_centroids, config.centroid_intermediate_top_k) == (backbone, 2048, 32)
        assert (config.text.vocab_size, config.text.hidden_size, config.text.sliding_window) == (262144, 2304, window)
        assert config.text.layer_types == assistants.LAYERS
        assert config.heads == {"sliding_attention": Heads(256, 4), "full_attention": Heads(512, 4)}
        assert config.text.rope_parameters["full_attention"] == {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 1.0}


def test_heads_may_be_written_by_layer(tmp_path, parts, kind):
    """As transformers writes them since 5.2."""
    settings, weights = parts
    first = load(assistants.write(tmp_path / "a", settings, weights))
    text = settings["text_config"]
    by_layer = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads") or 2}
    text["per_layer_config"] = {"3": by_layer}
    second = load(assistants.write(tmp_path / "b", settings, weights))
    assert first.config.heads == second.config.heads
    assert same(first, second, kind)


def test_how_many_tokens_it_is_meant_to_draft(tmp_path, parts):
    assistants.write(tmp_path, *parts)
    assert load(tmp_path).config.num_assistant_tokens == 1
    for text, expected in (({}, 1), ({"num_assistant_tokens": 4}, 4)):
        (tmp_path / "generation_config.json").write_text(json.dumps(text))
        assert load(tmp_path).config.num_assistant_tokens == expected
    for wrong in (0, 65, "4", 2.0, True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": wrong}))
        with pytest.raises(BadArtifact, match=r"generation_config\.json\.num_assistant_tokens is"):
            load(tmp_path)
