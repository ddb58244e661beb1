"""Which fingerprints no server of this machine can come upon any more.

Entries say what made them (their provenance). They are stale when other versions of
mlx or mlx-lm are installed now, or when the model's files are not what they were,
neither where they were nor anywhere else that a server with this directory has
looked at. What cannot be told is not stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm_hooks import ModelSource

from ...cold.listing import Listed
from ...digests import DigestMemo
from .hashing import hashing


class Staleness:
    """Judges the fingerprints of one directory. Digests of unchanged files are remembered there, so that weights are seldom read."""

    def __init__(self, root: Path):
        self._memo = DigestMemo(root / "identities.json")

    def reasons(self, entries: Iterable[Listed]) -> dict[str, str]:
        """Why, by fingerprint, for those that are stale."""
        provenances = {entry.fingerprint: entry.meta.provenance for entry in entries if entry.meta is not None}
        found = {fingerprint: self._reason(provenance) for fingerprint, provenance in provenances.items()}
        self._memo.save()
        return {fingerprint: why for fingerprint, why in found.items() if why}

    def _reason(self, provenance: Mapping[str, Any]) -> str:
        import mlx.core as mx  # not at the top: only this needs it of what the commands import

        for key, package, here in (("mlx", "mlx", mx.__version__), ("mlx_lm", "mlx-lm", version("mlx-lm"))):  # type: ignore[attr-defined]
            made = provenance.get(key)
            if isinstance(made, str) and made != here:
                return f"made by {package} {made}; {here} is installed"
        files, source = provenance.get("files"), source_of(provenance)
        if not isinstance(files, dict) or source is None or self._memo.holds(files.values()):
            return ""
        assert source.path is not None
        if not source.path.is_dir():
            return f"the model's directory {source.path} is gone"
        try:
            return "" if self._digests(source) == files else f"the files of {source.path} have changed"
        except OSError:
            return ""

    def _digests(self, source: ModelSource) -> dict[str, str]:
        from ...identity import source_files

        files = source_files(source)
        with hashing(files, self._memo) as digest:
            return {name: digest(path) for name, path in files.items()}


def source_of(provenance: Mapping[str, Any]) -> ModelSource | None:
    """Where the model was that made an entry; None when it does not say (entries of earlier versions)."""
    paths = provenance.get("paths")
    if not isinstance(paths, dict) or not all(isinstance(path, str) and "\0" not in path for path in paths.values()) or "model" not in paths:
        return None
    draft = ModelSource(Path(paths["draft"])) if "draft" in paths else None
    return ModelSource(Path(paths["model"]), Path(paths["adapter"]) if "adapter" in paths else None, draft)
