"""The host switched on with a witness, in this process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from witness import Witness

from mlx_lm_hooks import Invocation
from mlx_lm_patches.host import host


@pytest.fixture
def witness() -> Iterator[Witness]:
    """A witness whose hooks mlx-lm calls, as in a script."""
    import mlx_lm.server  # noqa: F401

    plugin = Witness()
    invocation = Invocation("script", argparse.Namespace(), frozenset())
    plugins = plugin.plugins()
    plugins.configure(invocation)
    host.activate(plugins, invocation)
    yield plugin
    host.deactivate()


@pytest.fixture(scope="session")
def llama(tiny_llama):
    from mlx_lm import load

    return load(str(tiny_llama))
