"""Which scheme a start asks for: ``--kv-scheme``, or mlx-lm's own flags, which mean the affine scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm_hooks import Invocation, UsageError

from . import layers
from .spec import PLAIN, Affine, Spec

_OURS = {"kv_bits": "--kv-bits", "kv_group_size": "--kv-group-size", "quantized_kv_start": "--quantized-kv-start"}


def choose(asked: Spec | None, invocation: Invocation) -> Spec:
    """The scheme of a start, which takes mlx-lm's flags over: it sees them unset. Raises UsageError."""
    args, given = invocation.args, invocation.given
    bits = getattr(args, "kv_bits", None) if invocation.command != "script" else None
    if asked is not None and "kv_scheme" in given:
        if flags := [flag for name, flag in _OURS.items() if name in given]:
            raise UsageError(f"--kv-scheme {asked} and {flags[0]} both say how KV is stored; leave one of them out")
    spec = asked or PLAIN
    if bits is not None and "kv_scheme" not in given:
        try:
            spec = Spec(Affine(bits, args.kv_group_size), max(0, args.quantized_kv_start), origin="--kv-bits")
        except ValueError as error:
            raise UsageError(f"--kv-bits {bits} --kv-group-size {args.kv_group_size}: {error}") from None
        args.kv_bits = None
    if spec.plain:
        return spec
    if spec.form is not None and spec.start > 0 and getattr(args, "draft_model", None):
        advice = "add --quantized-kv-start 0" if bits is not None else f"use {spec.form.word}:{spec.form}"
        raise UsageError(f"{spec.origin} {spec} with --draft-model cannot begin at token {spec.start}, where drafts would be cut; {advice}")
    if spec.path is not None:
        _checked(spec, layers.read, spec.path)
    model = getattr(args, "model", None)
    if isinstance(model, str) and Path(model).is_dir():
        _checked(spec, layers.check, spec, Path(model))
    return spec


def _checked(spec: Spec, check: Any, *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise UsageError(f"{spec.origin} {spec}: {error}") from None
