"""Small objects and pieces in a store, through obstore: with limits, timeouts, and counters of what it costs."""

from __future__ import annotations

import netrc
import os
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from mlx_lm_hooks import UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CONNECT = "2s"
STALLED = "5s"  # without a byte
WHOLE = "120s"  # one object
RETRIES = 0  # of obstore's own: what a reply holds is judged here, and so it is here that it is asked for again
BACKOFF = 0.05  # seconds before the second attempt, twice as long before the third
CHUNK = 1  # byte at least that a reader gets at once: what comes, as it comes, so that it is stopped at a trickle, too
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ATTEMPTS = 3  # at a reply that was cut off, or is not what was written

Reply = TypeVar("Reply")


class StoreFailed(Exception):
    """A request failed for a reason that lies in the store or on the way there. `denied`: it will go on failing."""

    def __init__(self, text: str, denied: bool = False):
        super().__init__(text)
        self.denied = denied


class Damaged(StoreFailed):
    """An object is not what was written, whichever way it got so."""


def persistent(ask: Callable[[], Reply], stop: Callable[[], bool] = lambda: False) -> Reply:
    """What `ask` gives, which is tried again while it fails for no lasting reason and nobody says `stop()`. Raises StoreFailed."""
    for attempt in range(1, ATTEMPTS):
        try:
            return ask()
        except StoreFailed as error:
            if error.denied or stop():
                raise
        time.sleep(BACKOFF * attempt)
    return ask()


class Listed(NamedTuple):
    """An object in a folder; `when` it was written last, in seconds since 1970."""

    name: str
    size: int
    when: float


class Objects:
    """Objects below a URL, by name. Thread-safe. Every method raises StoreFailed."""

    def __init__(self, store: ObjectStore):
        import obstore
        from obstore import exceptions

        self._obstore = obstore
        self._denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        self._store: Any = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def close(self) -> None:
        """End what is being read with StoreFailed: nobody waits for it any more."""
        self._closed = True

    def get(self, name: str, most: int) -> bytes | None:
        """An object's bytes; None when there is none. One of more than `most` bytes is refused before it is read."""
        data = bytearray()
        return bytes(data) if self.read(name, most, data.extend) else None

    def read(self, name: str, most: int, take: Callable[[memoryview], object]) -> bool:
        """Hand an object to `take` in chunks, no more than `most` bytes. False when there is none."""
        self._count("get")
        size = 0
        taking = False
        try:
            result = self._obstore.get(self._store, name)
            if result.meta["size"] > most:
                raise Damaged(f"an object has {result.meta['size']:,} bytes where there can be no more than {most:,}")
            for chunk in result.stream(min_chunk_size=CHUNK):
                if self._closed:
                    raise StoreFailed("nobody waits for it any more", denied=True)
                size += len(chunk)
                if size > most:
                    raise Damaged(f"an object has more than {most:,} bytes")
                taking = True
                take(memoryview(chunk))
                taking = False
        except FileNotFoundError:
            if taking:
                raise
            return False
        except Exception as error:
            if taking:  # it is the taker's
                raise
            raise self._failure(error) from error
        finally:
            self._count("read_bytes", size)
        return True

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object whole; who reads it meanwhile gets the old one or the new one."""
        self._count("put")
        try:
            self._obstore.put(self._store, name, data, use_multipart=False)
        except Exception as error:  # not to be found, too: there is no such bucket
            raise self._failure(error) from error
        self._count("written_bytes", len(data))

    def when(self, name: str) -> float | None:
        """When an object was written last, in seconds since 1970 by the store's clock; None when there is none."""
        self._count("head")
        meta = self._do(lambda: self._obstore.head(self._store, name))
        return _seconds(meta["last_modified"]) if meta is not None else None

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        self._count("delete")
        self._do(lambda: self._obstore.delete(self._store, name))

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""
        # WebDAV servers list the folder itself as well, and its path then begins with that of the URL.
        found = [Path(path) for path in self._listed(folder)["common_prefixes"]]
        return [path.name for path in found if path.parent.name == Path(folder).name]

    def files(self, folder: str) -> Iterator[Listed]:
        """The objects in a folder."""
        for meta in self._listed(folder)["objects"]:
            yield Listed(Path(meta["path"]).name, meta["size"], _seconds(meta["last_modified"]))

    def _listed(self, folder: str) -> Any:
        # One level at a time: WebDAV servers refuse to list whole trees.
        self._count("list")
        found = self._do(lambda: self._obstore.list_with_delimiter(self._store, folder + "/"))
        found = found or {"common_prefixes": [], "objects": []}
        self._count("list", len(found["objects"]) // 1000)  # a page each
        return found

    def counts(self) -> dict[str, int]:
        """Requests by kind, and bytes."""
        with self._lock:
            return {name: self._counts[name] for name in ("get", "head", "put", "list", "delete", "read_bytes", "written_bytes")}

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def _do(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreFailed:
        if isinstance(error, StoreFailed):
            return error
        return StoreFailed(_first_line(error), isinstance(error, self._denied))


def _first_line(error: Exception) -> str:
    """What may be shown of an error. The first line has no headers, and so no credentials, in it; but it may have what the store answered."""
    line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return "".join(char if char.isprintable() else "?" for char in line)


def _seconds(when: datetime) -> float:
    return when.timestamp()


def open_objects(url: str) -> Objects:
    """The objects below a URL that `parse_store` accepts. Nothing is asked of the store yet. Raises ImportError, ValueError."""
    from obstore.store import HTTPStore, LocalStore, S3Store

    parts = urlsplit(url)
    if parts.scheme == "file":
        return Objects(LocalStore(unquote(parts.path), mkdir=True))
    client: Any = {"connect_timeout": CONNECT, "read_timeout": STALLED, "timeout": WHOLE}
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=10)}
    if parts.scheme == "s3":
        # Keys, region and endpoint are those of the environment or of the machine's role. Who names an endpoint without TLS there means it.
        client["allow_http"] = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        return Objects(S3Store(parts.netloc, prefix=parts.path.strip("/") or None, client_options=client, retry_config=retry))
    client["allow_http"] = parts.scheme == "http"
    if (login := _login(parts.hostname or "")) is not None:
        client["default_headers"] = {"Authorization": login}
    return Objects(HTTPStore(url, client_options=client, retry_config=retry))


def check(url: str) -> None:
    """Raise UsageError when the store cannot be opened: what that needs is not installed, or not configured."""
    try:
        open_objects(url)
    except ImportError:
        raise UsageError("--shared-cache needs the package obstore; install it with: pip install 'mlx-lm-tiered[shared]'") from None
    except Exception as error:
        raise UsageError(f"--shared-cache: the store cannot be opened: {_first_line(error)}") from None


def _login(host: str) -> str | None:
    """What ~/.netrc (or the file that $NETRC names) has for a host, as a header."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    if found is None:
        return None
    return "Basic " + b64encode(f"{found[0]}:{found[2]}".encode()).decode()
