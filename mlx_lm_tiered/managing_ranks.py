"""Doing something to an entry of every rank: rank 0 names it by its tokens, which are the same everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from .managing import PATIENCE, Manager
from .prefix.orders import Busy
from .prefix.ram import Entry


class RanksManager(Manager):
    """`Manager` of one of several ranks. What it looks at is this rank's; what it changes is changed on all of them, where they have it."""

    everywhere: Callable[[str, Any], list[Any]]  # has all ranks do something (see `ranks.Company.all`)

    def works(self) -> dict[str, Callable[[Any], Any]]:
        """What each rank does, by name."""
        return {"demote": self._demote_here, "delete": self._delete_here, "delete_file": self._delete_file_here, "clear": self._clear_here}

    # Rank 0

    def demote(self, name: str) -> bool:
        if self._storage() is None:
            raise ValueError("there is no SSD tier to demote to (--ssd-cache)")
        return all(self._ask("demote", self._mark(name)))

    def delete_in_ram(self, name: str) -> int:
        return sum(self._ask("delete", self._mark(name)))

    def delete_on_disk(self, name: str) -> int:
        return sum(self._ask("delete_file", self.find_on_disk(name).path.stem))

    def clear(self) -> tuple[int, int]:
        entries, files = zip(*self._ask("clear", None), strict=True)
        return sum(entries), sum(files)

    def _ask(self, name: str, argument: Any) -> list[Any]:
        try:
            return self.everywhere(name, argument)
        except TimeoutError:
            raise Busy from None
        except RuntimeError as error:
            raise OSError(f"a rank could not do it ({error})") from None

    def _mark(self, name: str) -> str:
        return self._orders.do(lambda: _mark(self._in_ram(name)[1]), PATIENCE)

    # Every rank

    def _demote_here(self, mark: str) -> bool:
        """Whether none has stayed."""
        return self._orders.do(lambda: all([self._demote(name) for name in self._marked(mark)]), PATIENCE)

    def _delete_here(self, mark: str) -> int:
        return self._orders.do(lambda: sum([self._delete(name) for name in self._marked(mark)]), PATIENCE)

    def _delete_file_here(self, stem: str) -> int:
        storage = self._storage()
        found = [entry for entry in storage.store.catalog.all() if entry.path.stem == stem] if storage is not None else []
        return sum(storage.store.delete(entry) for entry in found) if storage is not None else 0

    def _clear_here(self, _: None) -> tuple[int, int]:
        return super().clear()

    def _marked(self, mark: str) -> list[str]:
        return [str(entry.number) for cache in self._caches() for entry in cache.ram if _mark(entry) == mark]


def _mark(entry: Entry) -> str:
    """Names an entry by its tokens and by what is stored beside it."""
    beside = entry.companion
    kind = f"{beside.schema}/{beside.version}" if beside is not None else ""
    return hashlib.sha256(kind.encode() + b"\0" + entry.key).hexdigest()


