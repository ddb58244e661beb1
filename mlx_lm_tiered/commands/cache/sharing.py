"""The store of ``cache push``, ``pull`` and ``expire``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ...shared.names import Team
from ...shared.objects import Objects, StoreFailed, check, open_objects
from ..terminal import PROGRAM, usage
from .options import setting

TOGETHER = 4  # requests at the same time


class Store(NamedTuple):
    """What the commands need of it."""

    url: str
    objects: Objects
    team: Team
    executor: Executor


@contextmanager
def store(args: argparse.Namespace) -> Iterator[Store]:
    """The store that flags or the environment name. Raises UsageError; a store that fails ends the command with OSError."""
    url = setting(args, "shared_cache")
    if url is None:
        usage("which store? give --shared-cache URL, or set MLX_LM_TIERED_SHARED_CACHE")
    check(url)
    with ThreadPoolExecutor(TOGETHER, f"{PROGRAM}-store") as executor:
        try:
            yield Store(url, open_objects(url), Team(setting(args, "shared_cache_team")), executor)
        except StoreFailed as error:
            raise OSError(None, str(error), url) from error
