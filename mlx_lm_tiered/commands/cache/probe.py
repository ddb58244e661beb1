"""``cache probe``: how much of a prompt is stored, where, and where the nearest stored sequence goes another way.

Offline it looks into a directory; with ``--server`` it asks a running server, which
knows what is in RAM, too. Either way nothing counts as used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ...cold import listing
from ...cold.checking import BadEntry
from ...index.keys import key_tokens
from ...prompts import BadPrompt, Prompt, Template, decode, parse, tokenizer_of, tokens_of
from ...settings import format_size
from ..terminal import say, usage
from .entries import chain_of, columns, counted, key_of, known, printable

BEFORE, BEHIND = 12, 12  # tokens of text around the place where sequences part
LABELS = {"ram": "RAM", "queue": "the queue", "ssd": "the SSD tier"}


def run(args: argparse.Namespace, root: Path | None) -> int:
    """Tell; 1 when no prefix would hit."""
    prompt = prompt_of(args)
    if args.server is not None:
        from .probing_server import ask

        found = ask(args.server, prompt)
        root = Path(found["directory"]) if found["directory"] else None
        tokenizer: Any = None
    else:
        from .probing_directory import look

        if root is None:
            usage("which directory? give it, or set MLX_LM_TIERED_SSD_CACHE; or ask a server with --server")
        if args.model is None:
            usage("--model is needed to look into a directory: it decides the tokens, and which entries fit")
        template = template_of(args)
        model = model_directory(args.model)
        tokenizer = tokenizer_of(model, template)
        try:
            tokens = tokens_of(tokenizer, prompt, template)
        except BadPrompt as error:
            usage(f"the prompt: {error}")
        found = look(args, root, model, tokens)
    found["divergence"] = divergence(found, root, tokenizer)
    found.pop("around")
    print(json.dumps(found, indent=2) if args.json else lines(found))
    return 0 if found["hit_tokens"] else 1


def prompt_of(args: argparse.Namespace) -> Prompt:
    """The prompt from ``--prompt`` or ``--messages``. Raises UsageError."""
    if (args.prompt is None) == (args.messages is None):
        usage("which prompt? give either --prompt TEXT (or @FILE, or - for standard input) or --messages FILE.json")
    text = args.prompt
    try:
        if args.messages is not None:
            return parse(json.loads(_contents(args.messages)))
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = _contents(text[1:])
        return parse({"prompt": text})
    except BadPrompt as error:
        usage(f"{args.messages or 'the prompt'}: {error}")
    except (ValueError, RecursionError) as error:
        usage(f"{args.messages}: {error}")


def _contents(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        usage(f"{file}: {getattr(error, 'strerror', None) or error}")


def template_of(args: argparse.Namespace) -> Template:
    """The flags that a server would have been started with. Raises UsageError."""
    try:
        arguments = json.loads(args.chat_template_args)
    except ValueError as error:
        usage(f"--chat-template-args: {error}")
    if not isinstance(arguments, dict):
        usage("--chat-template-args: it is not a JSON object")
    return Template(args.chat_template, args.use_default_chat_template, arguments, args.trust_remote_code)


def model_directory(name: str) -> Path:
    """The files of a model: a directory, or those of a hub name that were fetched before. Raises UsageError."""
    from ..terminal import model

    given = model(name)
    assert given is not None
    if Path(given).is_dir():
        return Path(given).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, local_files_only=True)).resolve()
    except Exception:  # of many classes, also for a name that is no name
        usage(f"{name} was not fetched yet; `probe` fetches nothing")


def divergence(found: dict[str, Any], root: Path | None, tokenizer: Any) -> dict[str, Any] | None:
    """Where the nearest stored sequence parts from the prompt, and both texts around, as far as they can be had."""
    if found["nearest_tier"] is None:
        return None
    nearest = found["tiers"][found["nearest_tier"]]
    at = nearest["common"]
    told: dict[str, Any] = {"tier": found["nearest_tier"], "length": nearest["length"], "at": at}
    if at >= min(nearest["length"], found["prompt_tokens"]):
        return told  # one is the beginning of the other
    start = max(0, at - BEFORE)
    around = found["around"]
    prompt = around["tokens"][start - around["from"] : at + BEHIND - around["from"]]
    on_disk = found["tiers"].get("ssd", {})
    stored = _stored(root, on_disk["file"], start, at) if on_disk.get("common") == at else []
    if tokenizer is None and Path(found["model"]).is_dir():
        tokenizer = tokenizer_of(Path(found["model"]))
    if tokenizer is not None:
        split = at - start
        told["before"] = decode(tokenizer, prompt[:split])
        told["prompt"] = decode(tokenizer, prompt[split:])
        if stored:
            told["stored"] = decode(tokenizer, stored[split:])
    return told


def _stored(root: Path | None, file: str, start: int, at: int) -> list[int]:
    """Tokens of a stored sequence, if this user may read it."""
    if root is None or not root.is_dir() or not file:
        return []
    try:
        entries = [entry for entry in listing.entries(root) if entry.fingerprint == file.partition("/")[0]]
        entry = next((entry for entry in entries if entry.path.name == file.partition("/")[2]), None)
        return key_tokens(key_of(chain_of(entry, known(entries))))[start : at + BEHIND] if entry is not None else []
    except (BadEntry, OSError) as error:
        say(f"the stored sequence cannot be read: {error}", 1)
        return []


def lines(found: dict[str, Any]) -> str:
    """The answer for people."""
    hit, total = found["hit_tokens"], found["prompt_tokens"]
    rows = [("model", found["model"]), ("prompt", counted(total, "token"))]
    rows.append(("would hit", f"{counted(hit, 'token')} in {LABELS[found['hit_tier']]}" if hit else "nothing"))
    rows += [("", f"{LABELS[tier]}: {look['hit']:,}") for tier, look in found["tiers"].items() if look["hit"] and tier != found["hit_tier"]]
    if found.get("chain"):
        rows.append(("to be read", f"{counted(found['chain'], 'file')}, {format_size(found['chain_bytes'])}"))
    if (part := found["divergence"]) is not None:
        rows.append(("nearest", f"a stored sequence of {counted(part['length'], 'token')} ({LABELS[part['tier']]}), which {_parts(part, total)}"))
        rows += [(name, _quote(part[key])) for name, key in (("before", "before"), ("prompt", "prompt"), ("stored", "stored")) if key in part]
    elif not hit:
        rows.append(("nearest", found.get("why") or "nothing stored for this model begins like it"))
    return columns([(name, printable(text)) for name, text in rows])


def _parts(part: dict[str, Any], total: int) -> str:
    if part["at"] < min(part["length"], total):
        return f"shares {counted(part['at'], 'token')} and diverges at token {part['at']:,}"
    return "ends there" if part["length"] == part["at"] < total else "begins with the whole prompt"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
