"""What a directory holds for a prompt, as a server that is started now would see it."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm_hooks import Invocation, ModelSource

from ...cold import listing
from ...cold.directory import Directory
from ...cold.scan import catalog_of
from ...digests import DigestMemo
from ...identity import Identity, compute, environment, source_files
from ...index.keys import token_key
from ...prefix.probing import Look, answer
from ...prefix.ram import usable_length
from ...schemes.choose import choose
from ...schemes.scheme import Scheme
from ...schemes.spec import parse as parse_scheme
from ...settings import env_name
from ...statistics import Statistics
from ..terminal import usage
from .entries import counted
from .hashing import hashing


def look(args: argparse.Namespace, root: Path, model: Path, tokens: list[int]) -> dict[str, Any]:
    """The same answer as a server's, of the SSD tier alone."""
    identity = None if args.fingerprint else identity_of(args, root, model)
    fingerprint = args.fingerprint or (identity.fingerprint if identity is not None else "")
    catalog = catalog_of(Directory(root, 0).files(), [fingerprint])
    key = token_key(tokens)
    found = catalog.find(fingerprint, "", key, len(tokens) - 1)
    closest = catalog.closest(fingerprint, "", key)
    hit = usable_length(tokens, found.length, found.entry.length, found.entry.serves) if found is not None else 0
    seen = Look(hit, closest.entry.length, closest.length, f"{fingerprint}/{closest.entry.path.name}") if closest is not None else Look()
    told: dict[str, Any] = {"model": str(model), "fingerprint": fingerprint} | answer(str(model), tokens, {"ssd": seen}, str(root))
    if found is not None and hit:
        told |= {"chain": len(found.entry.chain), "chain_bytes": sum(link.nbytes for link in found.entry.chain)}
    if not len(catalog) and identity is not None:
        told["why"] = why_nothing(root, identity)
    return told


def identity_of(args: argparse.Namespace, root: Path, model: Path) -> Identity:
    """The identity that a server with these flags would have. Raises UsageError."""
    scheme = scheme_of(args)
    adapter, draft = (Path(p).expanduser().resolve() if p else None for p in (args.adapter_path, args.draft_model))
    for path in (adapter, draft):
        if path is not None and not path.is_dir():
            usage(f"{path} is not a directory")
    source = ModelSource(model, adapter, ModelSource(draft, kv_scheme=scheme.name(draft)) if draft else None, scheme.name(model))
    memo = DigestMemo(root / "identities.json")
    with hashing(source_files(source), memo) as digest:
        identity = compute(source, digest, environment())
    memo.save()
    return identity


def scheme_of(args: argparse.Namespace) -> Scheme:
    """How a server with these flags and this environment would store KV. Raises UsageError."""
    text, flag = args.kv_scheme or os.environ.get(env_name("kv_scheme")), "--kv-scheme" if args.kv_scheme else env_name("kv_scheme")
    try:
        asked = parse_scheme(text) if text else None
    except ValueError as error:
        usage(f"{flag}: {error}")
    given = {name for name in ("kv_scheme", "kv_bits") if getattr(args, name) is not None}
    return Scheme(choose(asked, Invocation("server", args, frozenset(given))), Statistics())


def why_nothing(root: Path, identity: Identity) -> str:
    """One sentence for a model of which nothing is stored as it is now: is something stored of what it was?"""
    mine = identity.provenance
    others: Counter[str] = Counter()
    for entry in listing.entries(root):
        theirs = entry.meta.provenance if entry.meta is not None else {}
        if theirs.get("model") == mine["model"]:
            others[_differences(mine, theirs)] += 1
    if not others:
        return f"nothing is stored for this model (fingerprint {identity.fingerprint[:12]})"
    what, count = others.most_common(1)[0]
    return f"nothing is stored for this model as it is now; what is there of a model of this name ({counted(count)}) has another {what}"


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = {"mlx": "mlx", "mlx_lm": "mlx-lm", "kv_scheme": "KV scheme", "files": "set of files", "device": "device"}
    different = [name for key, name in names.items() if mine.get(key) != theirs.get(key)]
    return " and ".join(different) or "machine or version"
