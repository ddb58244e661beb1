"""A seam: one place where an unmodified mlx-lm is made to call the contract, and the three gates before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mlx_lm_hooks.types import PluginError, SeamReport

from .source import NotDefined, Sources, body_hash, signature

if TYPE_CHECKING:
    from .runtime import Runtime

log = logging.getLogger("mlx_lm_patches")

SUPPORTED = ">=0.32,<0.33"


@dataclass(frozen=True)
class Seam:
    """One hooked place.

    `kind` is ``replace`` (a class of ours), ``wrap`` (around a function or method
    where it is defined), ``global`` (a name that a consumer imported early) or
    ``check`` (nothing is changed, but the feature relies on how it behaves).
    `signature` is compared exactly; `bodies` maps known-good body hashes to the
    versions that have them. `why` says what the seam does, `until` what would let
    us remove it. `build(original, runtime)` makes the replacement, `probe(original)`
    raises when an unknown body does not behave.
    """

    feature: str
    module: str
    qualname: str
    kind: str
    signature: str
    bodies: Mapping[str, str]
    why: str
    until: str
    build: Callable[[Any, Runtime], Any] | None = None
    probe: Callable[[Any], None] | None = None
    versions: str = SUPPORTED

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"


def check(seam: Seam, sources: Sources) -> SeamReport:
    """Put one seam through the gates, statically: version range, signature, body."""
    found = sources.version()
    extra: dict[str, Any] = {"version": found, "kind": seam.kind, "why": seam.why}

    def report(state: str, detail: str = "") -> SeamReport:
        return SeamReport(seam.name, state, seam.feature, detail, extra)

    if not supported(found, seam.versions):
        return report("unsupported", f"mlx-lm {found} is installed, {seam.versions} is supported")
    if seam.signature == "import":
        if not sources.imports_module(seam.module, seam.qualname):
            return report("missing", f"{seam.module} does not import {seam.qualname}")
        return report("ok")
    try:
        node = sources.definition(seam.module, seam.qualname)
    except NotDefined as error:
        return report("missing", str(error))
    extra["signature"] = signature(node)
    extra["body"] = body_hash(node)
    if extra["signature"] != seam.signature:
        return report("mismatch", f"its parameters are {extra['signature']}, expected {seam.signature}")
    if extra["body"] not in seam.bodies:
        return report("unknown-body", f"its code ({extra['body']}) is not one this was tested with")
    return report("ok")


def supported(found: str, specifier: str = SUPPORTED) -> bool:
    """Whether a version is in range; pre-releases count as the release they precede."""
    try:
        return SpecifierSet(specifier).contains(Version(found).base_version)
    except InvalidVersion:
        return False


@dataclass
class Patch:
    """One name that has been changed, so that it can be changed back."""

    owner: Any
    attribute: str
    original: Any
    replacement: Any

    def ours(self) -> bool:
        """Whether the name still is what we made it."""
        return vars(self.owner).get(self.attribute) is self.replacement

    def undo(self) -> None:
        """Restore the original, unless someone has patched the name since: then ours stays beneath, and only passes through."""
        if self.ours():
            setattr(self.owner, self.attribute, self.original)


@dataclass
class Applied:
    """The seams that are in place."""

    patches: dict[tuple[str, str], Patch] = field(default_factory=dict)  # by feature and name: several features may wrap one place

    def apply(self, seams: Iterable[Seam], unknown: set[str], modules: Mapping[str, ModuleType], runtime: Runtime) -> None:
        """Put in place those seams whose modules are loaded, all or none. Raises PluginError.

        `unknown` has the names of seams with an unknown body, which are probed first.
        """
        done: list[tuple[str, str]] = []
        try:
            for seam in seams:
                module = modules.get(seam.module)
                if seam.build is None or module is None:
                    continue
                key = (seam.feature, seam.name)
                known = self.patches.get(key)
                if known is not None and self._in_place(known):
                    continue
                self.patches[key] = _apply(seam, module, runtime, seam.name in unknown)
                done.append(key)
        except Exception as error:
            for key in reversed(done):
                self.patches.pop(key).undo()
            if isinstance(error, PluginError):
                raise
            raise PluginError(f"mlx-lm could not be hooked: {type(error).__name__}: {error}") from error

    def _in_place(self, patch: Patch) -> bool:
        """Whether the name is what a patch made it, or another of ours lies upon that."""
        return patch.ours() or any(upon.original is patch.replacement and self._in_place(upon) for upon in self.patches.values())

    def undo(self) -> None:
        while self.patches:
            self.patches.popitem()[1].undo()


def _apply(seam: Seam, module: ModuleType, runtime: Runtime, probe: bool) -> Patch:
    owner: Any = module
    *path, attribute = seam.qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    if attribute not in vars(owner):
        raise PluginError(f"{seam.name} is missing in the loaded mlx-lm")
    original = vars(owner)[attribute]
    if probe and seam.probe is not None:
        try:
            seam.probe(original)
        except Exception as error:
            raise PluginError(f"{seam.name} does not behave as expected: {error}") from error
    assert seam.build is not None
    replacement = seam.build(original, runtime)
    setattr(owner, attribute, replacement)
    return Patch(owner, attribute, original, replacement)
