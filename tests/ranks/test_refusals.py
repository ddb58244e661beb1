"""What does not work with several ranks is refused with one sentence, before anything is served."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mlx_lm_hooks import Invocation, UsageError
from mlx_lm_patches.ranks import Group
from mlx_lm_tiered import plugin


@pytest.fixture(autouse=True)
def unconfigured():
    yield
    plugin.mlx_lm_unconfigure()


def configure(rank: int = 0, sharding: str = "tensor", **given: Any) -> Any:
    args = argparse.Namespace(model="m", host="127.0.0.1", port=8080, draft_model=None, num_draft_tokens=3, kv_bits=None, kv_group_size=64, quantized_kv_start=0, prompt_cache_size=10, **given)
    plugin.mlx_lm_configure(Invocation("server", args, frozenset(given), Group(rank, 2, sharding)))
    return plugin.current()


@pytest.mark.parametrize(
    "given",
    [
        {"paged_kv": True},
        {"speculation": "ngram"},
        {"generation_checkpoint": 64, "ssd_cache": "cold"},
        {"memory_budget": "8GB"},
        {"kv_scheme": "turbo"},
        {"shared_cache": "file:///store", "ssd_cache": "cold"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_refused(given: dict[str, Any], tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"without --{next(iter(given)).replace('_', '-')}"):
        configure(**given)


def test_kv_schemes_by_the_sharding():
    configure(kv_scheme="affine:8:32")
    with pytest.raises(UsageError, match="without --kv-scheme"):
        configure(kv_scheme="affine:8:32", sharding="pipeline")


def test_what_is_only_a_default_is_off(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLX_LM_TIERED_SSD_RESTORE", raising=False)
    runtime = configure(ssd_cache=str(tmp_path))
    assert runtime.settings.ssd_restore == "always"
    assert runtime.settings.memory_budget == 0


def test_prompts_to_warm_are_rank_0s(tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text('[{"prompt": "hello"}]')
    assert configure(rank=0, warm=str(prompts)).warmer is not None
    assert configure(rank=1, warm=str(prompts)).warmer is None
