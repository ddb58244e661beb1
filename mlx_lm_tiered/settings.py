"""Every setting, once: flag, environment name, type, default, help.

The command-line flags, the environment names, `mlx_lm_tiered.enable`'s keywords and
the table in the documentation are all made from the fields of `Settings`.
A flag beats the environment, the environment beats the default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_lm_hooks import UsageError

from .schemes.spec import Spec, parse
from .store_url import parse_store

ENV_PREFIX = "MLX_LM_TIERED_"
# A number that is found by measuring.
AUTO = "auto"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes from ``32GB``, ``1.5 GiB``, ``500M`` or a plain number. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 32GB, 500MB or 1.5GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_size(size: int) -> str:
    """A size as people write it, with decimal units."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def parse_switch(text: str | bool) -> bool:
    """True for 1, true, yes, on; False for 0, false, no, off. Raises ValueError."""
    if isinstance(text, bool):
        return text
    value = str(text).strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither on nor off; use 1 or 0")


def parse_drafts(text: str | int) -> int | str:
    """``auto`` or a number. Raises ValueError."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither auto nor a number") from None


def parse_window(text: str | int) -> int:
    """A positive number of tokens. Raises ValueError."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{text!r} is not a number of tokens above 0")
    return value


def parse_seconds(text: str | float) -> float:
    """A non-negative number of seconds. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < 10**7:
        raise ValueError(f"{text!r} is not a sensible number of seconds")
    return value


def parse_age(text: str | float) -> float:
    """Seconds from ``30d``, ``12h`` or a plain number of seconds. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dh]?)\s*", str(text))
    if not match:
        raise ValueError(f"{text!r} is not an age; write it like 30d or 12h")
    return parse_seconds(float(match[1]) * {"": 1, "h": 3600, "d": 86400}[match[2]])


def parse_directory(text: str | os.PathLike[str]) -> Path:
    """An absolute path, ``~`` expanded. Raises ValueError for an empty one or one that is a file."""
    if not str(text).strip():
        raise ValueError("the directory's name is empty")
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path


def parse_name(text: str | os.PathLike[str]) -> str:
    """A model's name or directory. Raises ValueError for an empty one."""
    if not str(text).strip():
        raise ValueError("the name is empty")
    return str(text)


def parse_file(text: str | os.PathLike[str]) -> Path:
    """An absolute path, ``~`` expanded. Raises ValueError for an empty one."""
    if not str(text).strip():
        raise ValueError("the file's name is empty")
    return Path(text).expanduser().absolute()


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that accepts exactly these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _setting(
    default: Any, parse: Callable[[Any], Any], help: str, *,
    shown: str = "", metavar: str = "", needs: str = "", upstream: bool = False, server: bool = False, secret: bool = False,
) -> Any:  # fmt: skip
    """A field of `Settings`.

    `needs` names the setting without which this one does nothing; `upstream` marks flags
    that upstream's server already has, `server` those that no other command has a use for, `secret` what is never shown.
    """
    return field(default=default, repr=not secret, metadata=dict(parse=parse, help=help, shown=shown, metavar=metavar, needs=needs, upstream=upstream, server=server))


@dataclass(frozen=True)
class Settings:
    """The plugin's settings after flags, environment and defaults."""

    prompt_cache_bytes: int | None = _setting(
        None, parse_size, "Size of the RAM tier; 0 switches it off.",
        shown="8GB or a quarter of memory, whichever is less", metavar="SIZE", upstream=True,
    )  # fmt: skip
    prompt_cache_size: int | None = _setting(
        None, int, "Number of entries in the RAM tier.", shown="no limit but the size", metavar="N", upstream=True
    )
    prompt_cache_min_tokens: int | None = _setting(
        None, int, "Reuse no prefix of fewer tokens; it saves little, and rounds differently than a whole prefill.",
        shown="1 in a server, 64 elsewhere", metavar="N",
    )  # fmt: skip
    kv_scheme: Spec | None = _setting(
        None, parse, "How KV is stored: bf16 (the model's own precision), affine:BITS[:GROUP][@START], turbo[:kBITSvBITS][@START] or config[:PATH].",
        shown="bf16, or what mlx-lm's --kv-bits say", metavar="SCHEME",
    )  # fmt: skip
    kernels: str = _setting(
        "auto", one_of("auto", "off"),
        "Decode attention over quantized KV, and the encoding of new tokens, by kernels of the plugin's: auto (where the device has them and their self-test passes) or off.",
        shown="auto", metavar="WHEN",
    )  # fmt: skip
    paged_kv: bool = _setting(
        False, parse_switch, "Keep KV of full-attention layers in blocks of one pool, which requests with the same prefix share.",
        shown="off", server=True,
    )  # fmt: skip
    paged_kv_block_size: int = _setting(
        256, int, "Tokens of a block.", shown="256", metavar="TOKENS", needs="paged_kv", server=True
    )
    paged_kv_pool: int | None = _setting(
        None, parse_size, "Bytes of the pool that all requests and stored prefixes share.",
        shown="8GB or a quarter of memory, whichever is less", metavar="SIZE", needs="paged_kv", server=True,
    )  # fmt: skip
    speculation: str | None = _setting(
        None, one_of("off", "ngram"),
        "Draft tokens of a request that is alone and verify them together: off, or ngram (what followed the same tokens earlier in prompt and answer).",
        shown="off, or by --draft-model", metavar="SOURCE",
    )  # fmt: skip
    draft_model: str | None = _setting(
        None, parse_name,
        "Directory or hub name of a model of the same vocabulary, or of an assistant of the model, that drafts; --speculation off leaves the flag to mlx-lm.",
        shown="none", metavar="MODEL", upstream=True, server=True,
    )  # fmt: skip
    assistant_position: str = _setting(
        "hold", one_of("hold", "advance", "before"),
        "Where an assistant places its drafts: hold (all at the next token's place), advance (each one further), before (all at the last token's). Changes what is accepted, never the output.",
        shown="hold", metavar="PLACE", needs="draft_model", server=True,
    )  # fmt: skip
    assistant_window: int | None = _setting(
        None, parse_window, "How many of the newest tokens an assistant sees of sliding layers, at most as many as the model does. Changes what is accepted, never the output.",
        shown="the model's window", metavar="TOKENS", needs="draft_model", server=True,
    )  # fmt: skip
    num_draft_tokens: int | str | None = _setting(
        None, parse_drafts, "Tokens that are drafted at a time at most, or auto: as many as pay, by what was measured in the request.",
        shown="ngram 8, a draft model 3", metavar="N", upstream=True, server=True,
    )  # fmt: skip
    spec_sampling: str = _setting(
        "target", one_of("target", "rejection"),
        "Who decides drafted tokens of requests that sample: target (the model's own sampled token, as without drafts) or rejection (speculative sampling, which accepts more of drafts drawn at random). Requests with a seed keep target.",
        shown="target", metavar="RULE",
    )  # fmt: skip
    spec_trace: Path | None = _setting(
        None, parse_file, "Append what became of each draft to FILE, one JSON object a line.", shown="none", metavar="FILE"
    )
    spec_strict: bool = _setting(
        False, parse_switch, "Verify drafts one token at a time, exactly as decoding without drafts computes: identical output in any precision, and no faster. For tests.",
        shown="off",
    )  # fmt: skip
    ssd_cache: Path | None = _setting(
        None, parse_directory, "Directory of the SSD tier; it is made if need be.", shown="off", metavar="DIR"
    )
    ssd_cache_max: int = _setting(
        32 * 10**9, parse_size, "Bytes on disk that the SSD tier may take, all files counted; never above half of what is free at start.",
        shown="32GB", metavar="SIZE", needs="ssd_cache",
    )  # fmt: skip
    ssd_cache_verify: str = _setting(
        "auto", one_of("auto", "always", "never"),
        "Check the checksums of an entry's tensors when it is restored: always, never, or auto (each file once, then while that costs less than the read).",
        shown="auto", metavar="WHEN", needs="ssd_cache",
    )  # fmt: skip
    ssd_restore: str = _setting(
        "auto", one_of("auto", "always", "never"),
        "When to restore from the SSD tier: auto (unless computing is expected to be clearly faster, by rates measured while serving), always, or never (it is only written).",
        shown="auto", metavar="WHEN", needs="ssd_cache",
    )  # fmt: skip
    ssd_queue: int = _setting(
        2 * 2**30, parse_size, "Bytes of entries that may wait to be written; the oldest is dropped beyond that.",
        shown="2GiB", metavar="SIZE", needs="ssd_cache",
    )  # fmt: skip
    ssd_demote_idle: float = _setting(
        300.0, parse_seconds, "Seconds without use after which an entry leaves RAM for the SSD tier; 0: never.",
        shown="300", metavar="SECONDS", needs="ssd_cache",
    )  # fmt: skip
    generation_checkpoint: int = _setting(
        0, int, "Keep a running generation on the SSD tier every so many tokens, so that the same request goes on after a kill; 0: never.",
        shown="off", metavar="TOKENS", needs="ssd_cache", server=True,
    )  # fmt: skip
    writebehind: bool = _setting(
        True, parse_switch, "Write entries to the SSD tier soon after each request, in idle turns. Off: only on eviction, flush and shutdown.",
        shown="on", needs="ssd_cache",
    )  # fmt: skip
    shared_cache: str | None = _setting(
        None, parse_store, "URL of a store behind the SSD tier that machines share: s3://BUCKET/PREFIX, http(s)://HOST/PATH (WebDAV) or file:///DIRECTORY.",
        shown="off", metavar="URL", needs="ssd_cache", server=True,
    )  # fmt: skip
    shared_cache_team: str = _setting(
        "", str, "Key of those who share: object names and signatures are made with it. A secret, so better in the environment than on the command line.",
        shown="none", metavar="KEY", needs="shared_cache", server=True, secret=True,
    )  # fmt: skip
    shared_cache_write: str = _setting(
        "idle", one_of("off", "idle", "always"), "When to upload new entries to the shared store: off (it is only read), idle (while no request runs) or always.",
        shown="idle", metavar="WHEN", needs="shared_cache", server=True,
    )  # fmt: skip
    shared_cache_bandwidth: int = _setting(
        0, parse_size, "Bytes a second that uploads may take; 0: no limit.", shown="no limit", metavar="SIZE", needs="shared_cache", server=True
    )
    shared_cache_max: int = _setting(
        100 * 10**9, parse_size, "Bytes that a team's entries may take in the shared store; the least recently used go first, once a day. 0: no limit.",
        shown="100GB", metavar="SIZE", needs="shared_cache", server=True,
    )  # fmt: skip
    shared_cache_ttl: float = _setting(
        30 * 86400.0, parse_age, "Age since its last use at which an entry leaves the shared store; 0: never.",
        shown="30d", metavar="AGE", needs="shared_cache", server=True,
    )  # fmt: skip
    memory_budget: int | None = _setting(
        None, parse_size,
        "Bytes that a server's arrays may take, the model's included; stored prefixes make room first, then requests are refused. 0: no guard.",
        shown="what the device recommends, else 80 % of memory", metavar="SIZE", server=True,
    )  # fmt: skip
    shutdown_timeout: float = _setting(
        120.0, parse_seconds, "Seconds a stopping server may take to finish requests and save.", shown="120", metavar="SECONDS", server=True
    )
    admin_routes: str = _setting(
        "local", one_of("local", "all", "off"), "Who may use /stats and /admin: local (this machine), all, or off (no one).",
        shown="local", metavar="WHO", server=True,
    )  # fmt: skip
    status_page: bool = _setting(
        True, parse_switch, "Serve a page at /tiered that shows what the tiers hold and do, to whom --admin-routes allows.", shown="on", server=True
    )
    cache_inspection: bool = _setting(
        False, parse_switch, "Show on the status page the text around the place where a prompt leaves the closest stored sequence, which another client may have sent.",
        shown="off", server=True,
    )  # fmt: skip
    metrics: str | None = _setting(
        None, one_of("local", "all", "off"), "Who may read /metrics: local (this machine), all, or off (no one). They tell how much is served, not what.",
        shown="as --admin-routes", metavar="WHO", server=True,
    )  # fmt: skip
    warm: Path | None = _setting(
        None, parse_file, "File of prompts that are prefilled at start while nobody asks for anything: JSON, or one JSON object a line.",
        shown="none", metavar="FILE", server=True,
    )  # fmt: skip


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """The environment name of a setting."""
    return ENV_PREFIX + name.upper()


def table() -> list[tuple[str, str, str, str]]:
    """Rows of (flag, environment name, default, help), for the documentation."""
    return [(flag(f.name), env_name(f.name), f.metadata["shown"], f.metadata["help"]) for f in fields(Settings)]


def add_arguments(group: argparse._ArgumentGroup, command: str) -> None:
    """Add the flags to a parser. Upstream's commands have some of them already.

    Values are parsed by `resolve`, so that flags, environment and keywords fail alike.
    """
    for f in fields(Settings):
        if f.metadata["parse"] is parse_drafts and (theirs := group._option_string_actions.get(flag(f.name))) is not None:
            theirs.type = parse_drafts  # upstream's flag, which takes a number
        if command == "server" and f.metadata["upstream"]:
            continue
        if command != "server" and f.metadata["server"]:
            continue
        text = f"{f.metadata['help']} Default: {f.metadata['shown']}. Environment: {env_name(f.name)}".replace("%", "%%")
        if f.metadata["parse"] is parse_switch:
            group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag(f.name), default=None, metavar=f.metadata["metavar"], help=text)


def resolve(values: Mapping[str, Any], given: frozenset[str], environ: Mapping[str, str]) -> Settings:
    """Settings from given values and the environment. Raises UsageError with one sentence.

    `values` are parsed arguments or keywords, of which `given` names those that were
    given explicitly; an unknown keyword is the caller's to refuse.
    """
    chosen: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for f in fields(Settings):
        if f.name in given and values.get(f.name) is not None:
            value, origin[f.name] = values[f.name], flag(f.name)
        elif environ.get(env_name(f.name), "").strip():
            value, origin[f.name] = environ[env_name(f.name)], env_name(f.name)
        else:
            continue
        chosen[f.name] = _parsed(f, value, origin[f.name])
    _refuse_contradictions(chosen, origin)
    return Settings(**chosen)


def _parsed(f: Field[Any], value: Any, origin: str) -> Any:
    try:
        parsed = f.metadata["parse"](value)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{origin}: {error}") from None
    if isinstance(parsed, int) and not isinstance(parsed, bool) and parsed < 0:
        raise UsageError(f"{origin}: {value!r} is negative")
    return parsed


def _refuse_contradictions(chosen: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    for f in fields(Settings):
        needs = f.metadata["needs"]
        # An environment name alone may come from a shell profile; a flag is meant.
        if needs and f.name in chosen and needs not in chosen and origin[f.name].startswith("--"):
            raise UsageError(f"{origin[f.name]} does nothing without {flag(needs)}; add {flag(needs)} or leave it out")
    if chosen.get("warm") is not None and origin["warm"].startswith("--"):
        for name in ("prompt_cache_bytes", "prompt_cache_size"):
            if chosen.get(name) == 0:
                raise UsageError(f"{origin['warm']} needs the RAM tier, which {origin[name]} 0 switches off; leave one of them out")
    if chosen.get("ssd_cache") is not None:
        for name in ("prompt_cache_bytes", "prompt_cache_size"):
            if chosen.get(name) == 0:
                raise UsageError(f"{origin['ssd_cache']} needs the RAM tier, which {origin[name]} 0 switches off; leave one of them out")
        if chosen.get("ssd_cache_max") == 0:
            raise UsageError(f"{origin['ssd_cache_max']} 0 leaves no room; leave out {origin['ssd_cache']} to switch the SSD tier off")


def default_ram_bytes() -> int:
    """8 GB or a quarter of the machine's memory, whichever is less."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 8 * 10**9
    return min(8 * 10**9, memory // 4)
