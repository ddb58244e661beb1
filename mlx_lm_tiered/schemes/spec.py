"""The value of ``--kv-scheme``, parsed once at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ..kernels.layout import AFFINE_BITS as BITS
from ..kernels.layout import AFFINE_GROUPS as GROUPS
from ..kernels.layout import Layout
from ..turboquant.codebooks import GROUP, KEY_BITS, VALUE_BITS, VERSION, unfit

DEFAULT_GROUP = 64
FORMS = "bf16, affine:BITS[:GROUP][@START], turbo[:kBITSvBITS][@START] or config[:PATH]"


@dataclass(frozen=True)
class Affine:
    """Keys and values in groups of `group_size` along the head dimension, each with a scale and a bias; see `mlx.core.quantize`."""

    word: ClassVar[str] = "affine"
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"{self.bits} bits are not possible; use {_or(BITS)}")
        if self.group_size not in GROUPS:
            raise ValueError(f"groups of {self.group_size} are not possible; use {_or(GROUPS)}")

    def __str__(self) -> str:
        return f"{self.bits}:{self.group_size}"

    @cached_property
    def layout(self) -> Layout:
        """How kernels read it."""
        return Layout.affine(self.bits, self.group_size)

    @property
    def key(self) -> str:
        """What tells stored KV of this form from others'."""
        return f"affine:{self}"

    def unfit(self, dim: int) -> str | None:
        """Why heads of `dim` cannot have this form, or None."""
        if dim % self.group_size == 0:
            return None
        fitting = [group for group in reversed(GROUPS) if dim % group == 0]
        return f"heads of {dim} cannot be cut into groups of {self.group_size}" + (f"; use {fitting[0]}" if fitting else "")

    def nbytes(self, keys: int, values: int, itemsize: int) -> int:
        """Bytes of so many elements of keys and of values, which were of `itemsize` bytes each."""
        # A scale and a bias a group, in the model's own type.
        return (keys + values) // self.group_size * (self.group_size * self.bits // 8 + 2 * itemsize)


@dataclass(frozen=True)
class Turbo:
    """TurboQuant: keys in groups of 32 with a scale and a zero point, values rotated and looked up in a code book; see `turboquant/codec.py`."""

    word: ClassVar[str] = "turbo"
    key_bits: int = 8
    value_bits: int = 3

    def __post_init__(self) -> None:
        if self.key_bits not in KEY_BITS:
            raise ValueError(f"keys in {self.key_bits} bits are not possible; use {_or(KEY_BITS)}")
        if self.value_bits not in VALUE_BITS:
            raise ValueError(f"values in {self.value_bits} bits are not possible; use {_or(VALUE_BITS)}")

    def __str__(self) -> str:
        return f"k{self.key_bits}v{self.value_bits}"

    @property
    def bits(self) -> int:
        return self.key_bits

    @property
    def group_size(self) -> int:
        return GROUP

    @cached_property
    def layout(self) -> Layout:
        """How kernels read it."""
        return Layout.turboquant(self.key_bits, self.value_bits)

    @property
    def key(self) -> str:
        """What tells stored KV of this form from others'; the version is the code books'."""
        return f"turbo-{self}.{VERSION}"

    def unfit(self, dim: int) -> str | None:
        """Why heads of `dim` cannot have this form, or None."""
        return unfit(dim)

    def nbytes(self, keys: int, values: int, itemsize: int) -> int:
        """Bytes of so many elements of keys and of values. A group has fp16 numbers: a key's a scale and a zero point, a value's a scale."""
        return keys // GROUP * (GROUP * self.key_bits // 8 + 4) + values // GROUP * (GROUP * self.value_bits // 8 + 2)


Form = Affine | Turbo


@dataclass(frozen=True)
class Spec:
    """A scheme as asked for. Immutable; `str` gives the text that parses to it again.

    `form` holds for every layer, from token `start` on. `config` reads a scheme for
    each layer from `path`, or from ``kv_config.json`` beside a model's weights. With
    neither, KV is stored in the model's own precision. `origin` is what to blame.
    """

    form: Form | None = None
    start: int = 0
    config: bool = False
    path: Path | None = None
    origin: str = field(default="--kv-scheme", compare=False)

    @property
    def affine(self) -> Affine | None:
        """The form, if it is mlx-lm's own."""
        return self.form if isinstance(self.form, Affine) else None

    @property
    def plain(self) -> bool:
        """Whether nothing is quantized."""
        return self.form is None and not self.config

    def __str__(self) -> str:
        if self.config:
            return "config" if self.path is None else f"config:{self.path}"
        return "bf16" if self.form is None else f"{self.form.word}:{self.form}@{self.start}"


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
        match = re.fullmatch(r"turbo(?::k(\d+)v(\d+))?(?:@(\d+))?", text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a scheme; write it like turbo, turbo:k8v4 or turbo:k8v3@2048")
        return Spec(Turbo(int(match[1]), int(match[2])) if match[1] else Turbo(), int(match[3] or 0))
    if word != "affine":
        raise ValueError(f"{text!r} is not a scheme; use {FORMS}")
    match = re.fullmatch(r"(\d+)(?::(\d+))?(?:@(\d+))?", rest)
    if match is None:
        raise ValueError(f"{text!r} is not a scheme; write it like affine:4, affine:4:32 or affine:8:64@2048")
    return Spec(Affine(int(match[1]), int(match[2] or DEFAULT_GROUP)), int(match[3] or 0))


def _or(values: tuple[int, ...]) -> str:
    *most, last = values
    return f"{', '.join(map(str, most))} or {last}"
