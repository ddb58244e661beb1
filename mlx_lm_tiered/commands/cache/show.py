"""``cache show``: what one entry's headers say, its chain of files, and on request its text."""

from __future__ import annotations

import argparse
import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from ...cold import listing
from ...cold.checking import BadEntry
from ...cold.family import NAME_DIGITS
from ...cold.listing import Listed
from ...cold.meta import Meta
from ...index.keys import key_tokens
from ...settings import format_size
from .entries import age, chain_of, chosen, columns, counted, key_of, known, model_of, moment, printable, relative
from .staleness import source_of

TEXT_TOKENS = 40  # at the beginning and at the end
MADE_WITH = ("mlx", "mlx_lm", "device", "architecture", "machine", "kv_scheme")


def run(args: argparse.Namespace, root: Path) -> int:
    """Show it; 1 when it cannot be used."""
    entries = list(listing.entries(root))
    entry = chosen(entries, args.entry)
    chain = chain_of(entry, known(entries))
    told = describe(entry, chain, entries)
    if args.text and entry.meta is not None:
        told["text"] = text_of(entry.meta, chain)
    print(json.dumps(told, indent=2) if args.json else lines(told))
    return 1 if entry.problem else 0


def describe(entry: Listed, chain: list[Listed], entries: list[Listed]) -> dict[str, Any]:
    """All that the headers say, for programs."""
    told: dict[str, Any] = {
        "file": relative(entry.path),
        "fingerprint": entry.fingerprint,
        "bytes": entry.nbytes,
        "used": moment(entry.used),
        "age_s": max(0.0, time.time() - entry.used / 1e9),
        "fault": entry.problem,
    }
    meta = entry.meta
    if meta is None:
        return told
    name = entry.path.name[:NAME_DIGITS]
    children = [e for e in entries if e.meta and e.path.parent == entry.path.parent and (e.meta.parent, e.meta.parent_checksum) == (name, entry.checksum)]
    return told | {
        "model": model_of(entry),
        "namespace": meta.namespace,
        "role": meta.role,
        "tokens": meta.length,
        "new_tokens": meta.length - meta.start,
        "created": moment(meta.created),
        "cuttable": meta.cuttable,
        "minimum_reusable": meta.minimum_reusable,
        "signatures": list(meta.signatures),
        "tensors": len(meta.tensors),
        "companion": _companion(meta),
        "chain": [_link(link) for link in chain],
        "chain_bytes": sum(link.nbytes for link in chain),
        "continued_by": [relative(child.path) for child in children],
        "provenance": dict(meta.provenance),
    }


def _companion(meta: Meta) -> dict[str, Any] | None:
    """What goes with all of its tokens beside the caches, for example a checkpoint's state."""
    if (state := meta.companion) is None:
        return None
    return {"schema": state.schema, "version": state.version, "scalars": dict(state.scalars), "tensors": list(state.tensors)}


def _link(link: Listed) -> dict[str, Any]:
    assert link.meta is not None
    return {"file": relative(link.path), "from": link.meta.start, "to": link.meta.length, "bytes": link.nbytes}


def text_of(meta: Meta, chain: list[Listed]) -> dict[str, str]:
    """The first and the last tokens as text, or under ``reason`` why there is none."""
    from ...prompts import decode, tokenizer_of

    source = source_of(meta.provenance)
    if source is None or source.path is None or not source.path.is_dir():
        return {"reason": "the model's directory is not known, or not there any more"}
    try:
        tokens = key_tokens(key_of(chain))
    except BadEntry as error:
        return {"reason": str(error)}
    tokenizer = tokenizer_of(source.path)
    last = {"last": decode(tokenizer, tokens[max(TEXT_TOKENS, len(tokens) - TEXT_TOKENS) :])} if len(tokens) > TEXT_TOKENS else {}
    return {"first": decode(tokenizer, tokens[:TEXT_TOKENS]), **last}


def lines(told: dict[str, Any]) -> str:
    """The same for people."""
    rows = [("entry", told["file"]), ("size", format_size(told["bytes"])), ("last used", age(told["age_s"]))]
    if told["fault"]:
        rows.append(("fault", told["fault"]))
    if "tokens" in told:
        rows[1:1] = [("model", f"{told['model']} (fingerprint {told['fingerprint'][:12]})"), ("tokens", f"{told['tokens']:,}, {told['new_tokens']:,} of them in this file")]
        rows += [
            ("created", told["created"]),
            ("kept at", {"system": "the end of the system prompt", "user": "the end of a prompt", "assistant": "the end of an answer"}.get(told["role"], told["role"])),
            ("reusable", _reusable(told)),
            ("layers", "; ".join(f"{len(list(same))} × {signature}" for signature, same in groupby(told["signatures"]))),
            *([("companion", _told(told["companion"]))] if told["companion"] else []),
            ("made with", ", ".join(f"{key} {told['provenance'][key]}" for key in MADE_WITH if told["provenance"].get(key))),
            ("continued by", counted(len(told["continued_by"])) if told["continued_by"] else "none"),
        ]
    text = columns([(name, printable(str(value))) for name, value in rows])
    if len(told.get("chain", ())) > 1:
        links = [("chain", "tokens", "size")]
        links += [(link["file"].partition("/")[2][:12], f"{link['from']:,} to {link['to']:,}", format_size(link["bytes"])) for link in told["chain"]]
        text += f"\n\n{columns(links)}\n{counted(len(told['chain']), 'file')}, {format_size(told['chain_bytes'])}"
    for name, value in told.get("text", {}).items():
        text += f"\n\n{name}: {printable(value.replace(chr(10), '⏎'))}"
    return text


def _told(companion: dict[str, Any]) -> str:
    scalars = ", ".join(companion["scalars"]) or "none"
    return f"{companion['schema']}/{companion['version']}: {counted(len(companion['tensors']), 'tensor')}; scalars: {scalars}"


def _reusable(told: dict[str, Any]) -> str:
    if not told["cuttable"]:
        return "whole only"
    return f"at every token from {told['minimum_reusable']:,} on" if told["minimum_reusable"] > 1 else "at every token"
