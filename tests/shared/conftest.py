"""Two machines and the store between them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "cold"))

from shared_helpers import TOKENS, Machine, conversation, memory, push  # noqa: E402


@pytest.fixture
def objects():
    return memory()


@pytest.fixture
def machine(objects, tmp_path):
    """Makes machines on one store, by name."""
    made = []

    def make(name: str, **options) -> Machine:
        made.append(Machine(tmp_path / name, options.pop("objects", objects), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def filled(machine, objects):
    """A store that has one entry, as a chain of two files."""
    a = machine("a")
    conversation(a.cold, 400, 900)
    push(objects, a.cold, TOKENS)
    return objects
