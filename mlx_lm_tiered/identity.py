"""What makes a stored KV cache valid: everything that decides the numbers in it.

The fingerprint of a model covers its weights, configuration, code and token ids,
adapter and draft, the KV scheme, mlx, mlx-lm and the device. Entries live in a
directory named by it, so whatever changes, entries of before are simply not seen.

Files go in by their SHA-256. Hashing tens of gigabytes takes a while, so it happens
in the background, and digests are remembered as long as a file's identity, size and
times (ctime included, which a program cannot set) are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_lm_hooks import ModelSource

from .digests import MEMO_BYTES, DigestMemo, file_digest, stat_key

logger = logging.getLogger("mlx_lm_tiered")

FORMAT_VERSION = 1  # of the meaning of what is stored; the file format has its own

# Within a model's directory. Chat templates are not among them: another template
# gives other tokens, and tokens are compared.
MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "*.py", "tokenizer.json", "tokenizer.model", "vocab.json",
    "merges.txt", "added_tokens.json", "*.tiktoken",
)  # fmt: skip
ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
MAX_SOURCES = 16  # remembered; a server swaps between a few models


@dataclass(frozen=True)
class Identity:
    """A model's `fingerprint` (32 hex digits), and the `provenance` it was made from, which goes into file headers."""

    fingerprint: str
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)


def source_files(source: ModelSource) -> dict[str, Path]:
    """The files that decide a source's numbers, by a name that does not depend on where they are."""
    files = _matching(source.path, MODEL_FILES, "")
    files |= _matching(source.adapter_path, ADAPTER_FILES, "adapter/")
    if source.draft is not None:
        files |= {f"draft/{name}": path for name, path in source_files(source.draft).items()}
    return files


def stat_signature(source: ModelSource) -> Hashable:
    """The files as they are, without reading them: equal while nothing was changed or replaced. For telling models of one process apart."""
    return tuple((name, *stat_key(path)) for name, path in sorted(source_files(source).items())), _schemes(source), source.shard


def environment() -> dict[str, str]:
    """What computes: versions and device."""
    info = mx.device_info()
    return {
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "mlx_lm": version("mlx-lm"),
        "device": mx.default_device().type.name,
        "architecture": f"{info.get('architecture', '')} {info.get('device_name', '')}".strip(),
        "machine": platform.machine(),
    }


def compute(source: ModelSource, digest: Callable[[Path], str], where: Mapping[str, str]) -> Identity:
    """The identity of a source, with `digest` for its files and `where` from `environment`. Raises OSError."""
    provenance = {
        "format": FORMAT_VERSION,
        **where,
        "kv_scheme": _schemes(source),
        **({"shard": source.shard} if source.shard else {}),
        "files": {name: digest(path) for name, path in sorted(source_files(source).items())},
    }
    text = json.dumps(provenance, sort_keys=True, separators=(",", ":"))
    # Where the files are is no part of the fingerprint: a model that is moved keeps its entries.
    told = {"model": model_name(source.path), "paths": _paths(source)}
    return Identity(hashlib.sha256(text.encode()).hexdigest()[:32], {**provenance, **told})


def model_name(path: Path | None) -> str:
    """What people call the model of a directory: its name, or for one of the hub's snapshots OWNER/NAME."""
    if path is None:
        return ""
    if path.parent.name == "snapshots" and (folder := path.parent.parent.name).startswith("models--"):
        return folder.removeprefix("models--").replace("--", "/", 1)
    return path.name


class IdentityResolver:
    """Identities of the models of this process, computed in the background. Thread-safe.

    Digests are remembered in ``identities.json`` under `root`, which grows to
    `memo_bytes` at most. `known` gets each fingerprint as soon as there is one, on
    the thread that computed it.
    """

    def __init__(
        self, root: Path | None = None, *, memo_bytes: int = MEMO_BYTES, known: Callable[[str], None] = lambda fingerprint: None
    ):
        self._known = known
        self._memo = DigestMemo(Path(root).expanduser() / "identities.json" if root is not None else None, memo_bytes)
        self._lock = threading.Lock()
        self._results: dict[ModelSource, _Result] = {}
        self._stop = threading.Event()

    def request(self, source: ModelSource) -> None:
        """Start to compute a source's identity, once. Sources without a path have none."""
        if source.path is not None:
            self._result(source)

    def get(self, source: ModelSource, timeout: float = 0.0) -> Identity | None:
        """The identity, waiting up to `timeout` seconds for it; None when there is none (yet)."""
        if source.path is None:
            return None
        result = self._result(source)
        result.ready.wait(timeout)
        return result.identity

    def pending(self, source: ModelSource) -> bool:
        """Whether `get` may answer differently later."""
        return source.path is not None and not self._stop.is_set() and not self._result(source).ready.is_set()

    def close(self) -> None:
        """Stop hashing soon."""
        self._stop.set()

    def _result(self, source: ModelSource) -> _Result:
        with self._lock:
            result = self._results.get(source)
            if result is None:
                while len(self._results) >= MAX_SOURCES:
                    del self._results[next(iter(self._results))]
                result = self._results[source] = _Result()
                try:
                    where = environment()  # here, because the default device is the calling thread's
                except Exception as error:
                    logger.warning("SSD cache: off for %s: mlx does not say what it computes on (%s)", source.path, error)
                    result.ready.set()
                    return result
                threading.Thread(
                    target=self._compute, args=(source, where, result), name="mlx-lm-tiered-identity", daemon=True
                ).start()
            return result

    def _compute(self, source: ModelSource, where: dict[str, str], result: _Result) -> None:
        started = time.perf_counter()
        try:
            result.identity = compute(source, lambda path: file_digest(path, self._memo, self._stop.is_set), where)
            logger.info("SSD cache: model fingerprint %s in %.1f s", result.identity.fingerprint, time.perf_counter() - started)
            self._known(result.identity.fingerprint)
        except InterruptedError:
            logger.debug("SSD cache: fingerprinting stopped")
        except Exception as error:  # whatever a model's files do, it is served without the SSD tier then
            logger.warning("SSD cache: off for %s: its files cannot be fingerprinted (%s)", source.path, error)
        finally:
            result.ready.set()
        self._memo.save()


class _Result:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.identity: Identity | None = None


def _schemes(source: ModelSource) -> str:
    draft = f" draft {_schemes(source.draft)}" if source.draft is not None else ""
    return source.kv_scheme + draft


def _paths(source: ModelSource) -> dict[str, str]:
    """Where the files are, for `mlx_lm.tiered cache` to look whether they still are."""
    places = {"model": source.path, "adapter": source.adapter_path, "draft": source.draft.path if source.draft is not None else None}
    return {name: str(path) for name, path in places.items() if path is not None}


def _matching(folder: Path | None, patterns: tuple[str, ...], prefix: str) -> dict[str, Path]:
    if folder is None:
        return {}
    found = {path.name: path for pattern in patterns for path in folder.glob(pattern)}
    return {prefix + name: path for name, path in found.items() if path.is_file()}
