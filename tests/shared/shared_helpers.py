"""Machines in one process: an SSD tier each, and one store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from obstore.store import MemoryStore

from cold_helpers import FINGERPRINT, LARGE, grown, job, save
from mlx_lm_tiered.cold.store import ColdStore
from mlx_lm_tiered.index.keys import token_key
from mlx_lm_tiered.prefix.rates import Rates
from mlx_lm_tiered.settings import Settings
from mlx_lm_tiered.shared.lookup import Lookup
from mlx_lm_tiered.shared.names import Names, Team
from mlx_lm_tiered.shared.objects import Objects
from mlx_lm_tiered.shared.pushing import Pushing
from mlx_lm_tiered.shared.tier import Fetch, SharedTier

NAMES = Names(Team("a key"), FINGERPRINT)
TOKENS = [7 * i % 1000 for i in range(900)]
KEY = token_key(TOKENS)
POOL = ThreadPoolExecutor(4)


class Machine:
    """An SSD tier, and the shared tier behind it."""

    def __init__(self, root: Path, objects: Objects, team: str = "a key", max_bytes: int = LARGE, **settings):
        self.cold = ColdStore(root, max_bytes)
        self.cold.attach(FINGERPRINT)
        assert self.cold.wait_scanned(30)
        self.rates = Rates()
        chosen = Settings(shared_cache="memory:", shared_cache_team=team, **{"shared_cache_write": "off", "ssd_restore": "always", **settings})
        self.busy = False
        self.shared = SharedTier(chosen, self.cold, self.rates, lambda: self.busy, lambda: False, lambda: None, objects)

    def ask(self, tokens: list[int], have: int = 0) -> Fetch | None:
        """One request's fetch, once it is over."""
        fetch = self.shared.begin(FINGERPRINT, token_key(tokens), have, len(tokens) - 1)
        if fetch is not None:
            fetch.wait()
        return fetch

    def outcome(self, tokens: list[int], have: int = 0) -> str:
        before = self.shared.stats()
        self.ask(tokens, have)
        after = self.shared.stats()
        return next((name for name in ("misses", "fetched", "not_worth", "late", "failed", "refused") if after[name] > before[name]), "")

    def close(self) -> None:
        self.shared.close()
        self.cold.close()


def memory() -> Objects:
    return Objects(MemoryStore())


def conversation(cold: ColdStore, *lengths: int, tokens: list[int] = TOKENS, seed: int = 0) -> list[Path]:
    """Store a conversation's entries of these lengths, each going on from the one before."""
    return [save(cold, job(tokens[:length], grown(length, seed=seed))) for length in lengths]


def entry_of(cold: ColdStore, tokens: list[int]):
    found = cold.find(FINGERPRINT, "", token_key(tokens), len(tokens))
    assert found is not None and found.length == len(tokens)
    return found.entry


def push(objects: Objects, cold: ColdStore, tokens: list[int], names: Names = NAMES, **options):
    return Pushing(objects, Lookup(objects, POOL)).push(names, entry_of(cold, tokens), **options)


def everything(objects: Objects) -> dict[str, bytes]:
    """All objects, by name."""
    found = {}
    for kind in ("pieces", "entries", "rungs", "uses"):
        for listed in objects.files(f"{NAMES.folder}/{kind}"):
            found[f"{kind}/{listed.name}"] = objects.get(NAMES.place(kind, listed.name), 1 << 30)
    return found
