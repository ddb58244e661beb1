"""The value of ``--kv-scheme``, parsed once at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64
FORMS = "bf16, affine:BITS[:GROUP][@START] or config[:PATH]"


@dataclass(frozen=True)
class Affine:
    """Keys and values in groups of `group_size` along the head dimension, each with a scale and a bias; see `mlx.core.quantize`."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"{self.bits} bits are not possible; use {_or(BITS)}")
        if self.group_size not in GROUPS:
            raise ValueError(f"groups of {self.group_size} are not possible; use {_or(GROUPS)}")

    def __str__(self) -> str:
        return f"{self.bits}:{self.group_size}"


@dataclass(frozen=True)
class Spec:
    """A scheme as asked for. Immutable; `str` gives the text that parses to it again.

    `affine` holds for every layer, from token `start` on. `config` reads a scheme for
    each layer from `path`, or from ``kv_config.json`` beside a model's weights. With
    neither, KV is stored in the model's own precision. `origin` is what to blame.
    """

    affine: Affine | None = None
    start: int = 0
    config: bool = False
    path: Path | None = None
    origin: str = field(default="--kv-scheme", compare=False)

    @property
    def plain(self) -> bool:
        """Whether nothing is quantized."""
        return self.affine is None and not self.config

    def __str__(self) -> str:
        if self.config:
            return "config" if self.path is None else f"config:{self.path}"
        return "bf16" if self.affine is None else f"affine:{self.affine}@{self.start}"


PLAIN = Spec()


def parse(text: str | Spec) -> Spec:
    """A scheme from its text. Raises ValueError with one sentence."""
    if isinstance(text, Spec):
        return text
    word, colon, rest = text.strip().partition(":")
    if word == "bf16" and not colon:
        return PLAIN
    if word == "config":
        if colon and not rest.strip():
            raise ValueError("config: is followed by no path; leave out the colon to use the kv_config.json beside the weights")
        return Spec(config=True, path=Path(rest).expanduser().absolute() if colon else None)
    if word.startswith("turbo"):
        raise ValueError(f"{text!r}: TurboQuant is not in this version; use {FORMS}")
    if word != "affine":
        raise ValueError(f"{text!r} is not a scheme; use {FORMS}")
    match = re.fullmatch(r"(\d+)(?::(\d+))?(?:@(\d+))?", rest)
    if match is None:
        raise ValueError(f"{text!r} is not a scheme; write it like affine:4, affine:4:32 or affine:8:64@2048")
    return Spec(Affine(int(match[1]), int(match[2] or DEFAULT_GROUP)), int(match[3] or 0))


def _or(values: tuple[int, ...]) -> str:
    *most, last = values
    return f"{', '.join(map(str, most))} or {last}"
