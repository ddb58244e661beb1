"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mlx_lm_tiered import openblas

# Tiny models compute as fast as they are restored; what is decided then would depend on what else the machine does.
os.environ.setdefault("MLX_LM_TIERED_SSD_RESTORE", "always")

# Before any test imports mlx: its CPU wheel computes some twenty times faster with it.
openblas.load()

# Who starts the tests in the background or under nohup has these ignored, and every process they start as well.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

from support.models import TINY  # noqa: E402


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """3 KVCache."""
    return TINY["llama"]


@pytest.fixture(scope="session")
def tiny_lfm2() -> Path:
    """Hybrid: 2 ArraysCache + 2 KVCache."""
    return TINY["lfm2"]


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    """2 RotatingKVCache(64) + 2 KVCache."""
    return TINY["gemma3_text"]


@pytest.fixture(scope="session")
def tiny_gemma4() -> Path:
    """KV sharing: 2 RotatingKVCache(64) + 2 KVCache for 4 layers or more."""
    return TINY["gemma4_text"]


@pytest.fixture(params=sorted(TINY), scope="session")
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Every tiny trained model in turn."""
    return TINY[request.param]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A path for an SSD tier; the tier makes the directory."""
    return tmp_path / "cold"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct in fp32, fetched at the first use and kept in the user's cache directory."""
    from mlx_lm_tiered.demo.model import prepare

    return prepare()
