"""Rows under a scheme: each answers as it does alone, whoever joins and leaves, whatever the chunks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from families import CONFIGS, build
from scheme_runs import alone, batch, loaded, prompt, scheme

from mlx_lm_tiered.schemes.caches import QuantizedKVCache, RotatingQuantizedKVCache
from support.models import TINY

# Past the windows of 64; the second joins a prefill, the fourth a decoding batch that others have left.
REQUESTS = [(0, prompt(17, 1), 52), (2, prompt(90, 2), 25), (5, prompt(33, 3), 30), (40, prompt(150, 4), 8)]
# With a start among the prompts' lengths, rows convert in their prefill, while they decode, or not at all.
RUNS = [
    ("llama", "affine:4:32"), ("llama", "affine:3:32@47"), ("gemma3_text", "affine:4:32"), ("gemma3_text", "affine:8:32@60"),
    ("gemma4_text", "affine:8:32"), ("gemma4_text", "affine:3:32@47"), ("lfm2", "affine:5:32@60"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), RUNS)
def test_rows_equal_their_solo_runs(name, text):
    with scheme(text):
        model = loaded(TINY[name])
        together = batch(model, REQUESTS)
        for (_, tokens, count), row in zip(REQUESTS, together, strict=True):
            assert row == batch(model, [(0, tokens, count)])[0]
            assert row == alone(model, tokens, count, step=48), "one at a time, in other chunks"


def test_every_layer_its_own_scheme(tmp_path):
    folder = shutil.copytree(TINY["gemma3_text"], tmp_path / "model")
    config = [{"layer_idx": 0, "bits": 8, "group_size": 32}, {"layer_idx": 3, "bits": 3, "group_size": 32}]
    (folder / "kv_config.json").write_text(json.dumps(config))
    with scheme("config"):
        from mlx_lm.models.cache import make_prompt_cache

        model = loaded(folder)
        caches = make_prompt_cache(model)
        kinds = [(type(c).__name__, getattr(c, "bits", None)) for c in caches]
        assert kinds == [("RotatingQuantizedKVCache", 8), ("KVCache", None), ("RotatingKVCache", None), ("QuantizedKVCache", 3)]
        together = batch(model, REQUESTS)
        for (_, tokens, count), row in zip(REQUESTS, together, strict=True):
            assert row == batch(model, [(0, tokens, count)])[0] == alone(model, tokens, count)


def test_the_start_is_exact_whatever_the_chunks():
    """Logits and caches are a function of the tokens: what was computed before token 60 saw full precision, all later ones quantized KV."""
    with scheme("affine:4:32@60"):
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        model = loaded(TINY["gemma3_text"])
        runs = []
        for step in (7, 48, 60, 2048):
            caches = make_prompt_cache(model)
            seen: list[int] = []
            options = {"prompt_cache": caches, "logits_processors": [lambda tokens, logits: (seen.append(tokens.size), logits)[1]]}
            [(_, logprobs)] = generate_step(mx.array(prompt(90)), model, max_tokens=1, prefill_step_size=step, **options)
            assert {c.minimum_reusable_offset for c in caches} == {60}
            assert {type(c) for c in caches} == {QuantizedKVCache, RotatingQuantizedKVCache}
            assert seen[0] == 90, "a logits processor is shown the whole prompt"
            runs.append(logprobs)
        assert all(mx.abs(a - runs[0]).max() < 1e-3 for a in runs)


def test_whoever_holds_a_slice_of_the_caches_sees_them_converted():
    """Fault 4's kind: upstream replaces entries of a copy, and a stale list is stored."""
    with scheme("affine:4:32@20"):
        from mlx_lm.models.cache import make_prompt_cache

        model = loaded(TINY["llama"])
        caches = make_prompt_cache(model)
        alone(model, prompt(40), 3, caches=caches[:])
        assert [type(c) for c in caches] == [QuantizedKVCache] * 3
        assert [c.offset for c in caches] == [43] * 3


def test_drafts_with_quantized_caches_give_the_same_tokens():
    """Fault 4: a draft model and quantized caches, both models' in one list."""
    with scheme("affine:8:32"):
        from mlx_lm.generate import speculative_generate_step
        from mlx_lm.models.cache import make_prompt_cache

        model = loaded(TINY["llama"])
        expected = alone(model, prompt(40), 24)
        caches = make_prompt_cache(model) + make_prompt_cache(model)
        steps = speculative_generate_step(mx.array(prompt(40)), model, model, num_draft_tokens=3, max_tokens=24, prompt_cache=caches)
        assert [int(token) for token, _, _ in steps] == expected
        assert {type(c) for c in caches} == {QuantizedKVCache}


GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 1024, "rms_norm_eps": 1e-5,
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 32,
    "rope_theta": 10000, "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"rope_type": "default"},
}  # fmt: skip
FEW = [(0, prompt(17, 1), 25), (2, prompt(50, 2), 10)]


def test_attention_with_sinks():
    import importlib

    with scheme("affine:8:32@30"):
        module = importlib.import_module("mlx_lm.models.gpt_oss")
        mx.random.seed(1)
        model = module.Model(module.ModelArgs.from_dict(GPT_OSS))
        for layer in model.layers:
            layer.self_attn.sinks = mx.random.normal((4,))
        together = batch(model, FEW)
        assert together == [batch(model, [(0, *request[1:])])[0] for request in FEW] == [alone(model, *request[1:]) for request in FEW]
        caches = model.make_cache()
        alone(model, *FEW[1][1:], caches=caches)
        assert {type(c) for c in caches} == {QuantizedKVCache, RotatingQuantizedKVCache}


@pytest.mark.parametrize("text", ["affine:8:32", "affine:8:32@30"])
def test_a_model_that_cannot_have_the_scheme_keeps_full_precision(caplog, monkeypatch, text):
    """Latent attention takes keys apart; heads of 16 are no whole groups."""
    latent = CONFIGS["nested"] | {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
    monkeypatch.setitem(CONFIGS, "nested", latent)
    expected = {}
    for asked in ("bf16", text):
        with scheme(asked):
            for family in ("nested", "dense"):
                model, _ = build(family)
                expected.setdefault(family, alone(model, prompt(40), 6))
                assert alone(model, prompt(40), 6) == expected[family]
                assert batch(model, [(0, prompt(40), 6)]) == [expected[family]]
    warnings = [record.getMessage() for record in caplog.records if "is off for this model" in record.getMessage()]
    assert len(warnings) == 1 and "attention cannot read quantized KV" in warnings[0]


def test_the_generate_command_takes_upstreams_flags_over(tiny_gemma3):
    """Fault 6: Gemma with --kv-bits ends in NotImplementedError in mlx-lm."""
    command = [sys.executable, "-m", "mlx_lm.generate", "--plugin", "tiered", "--model", str(tiny_gemma3), "--prompt", "The cache", "--max-tokens", "90"]
    flags = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "20"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Generation: 90 tokens" in done.stdout, done.stderr[-500:]
