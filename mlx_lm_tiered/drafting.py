"""The source of drafts that a start has chosen, wired to the tiers, the memory budget and the model that answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_lm_hooks import ModelSource

from .memory.room import Room
from .prefix.beside import Beside
from .prefix.tiers import TieredPrefixCache
from .settings import Settings
from .speculation.choose import Drafting

if TYPE_CHECKING:
    from .speculation.source import DraftSource


def identity(drafting: Drafting) -> ModelSource | None:
    """The source of a draft model that has caches of its own."""
    return ModelSource(drafting.path, key=("draft", str(drafting.path))) if drafting.source == "draft" else None


def source(
    drafting: Drafting,
    settings: Settings,
    prefixes: Callable[[], TieredPrefixCache | None],
    served: Callable[[], Path | None],
    spare: Callable[[], float],
) -> DraftSource:
    """The source. `prefixes` gives what stores the run's prefixes, `served` the directory of the model that answers, `spare` the bytes that the memory budget has left."""
    if drafting.path is None:
        from .speculation.ngram import NGramSource

        return NGramSource()
    draft = identity(drafting)
    if draft is None:
        from .speculation.assistant.source import AssistantSource

        return AssistantSource(drafting.path, settings.assistant_position, settings.assistant_window)
    from .speculation.draft_model import DraftModelSource

    def beside() -> Beside | None:
        cache = prefixes()
        return Beside(cache, draft) if cache is not None else None

    return DraftModelSource(drafting.path, beside, served, Room(spare))
