"""Reading the installed mlx-lm without importing it: where names are defined, their signatures and body hashes."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "mlx_lm"

# Fields that say nothing about behaviour, or that differ between Python 3.11 and 3.15.
_SKIPPED = frozenset({"ctx", "type_comment", "type_params", "kind", "type_ignores"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class NotDefined(LookupError):
    """A name that is not where it should be; the text says which."""


class Sources:
    """The parsed source files of one mlx-lm, found like an import would find them; nothing is executed.

    Raises FileNotFoundError when mlx-lm is not installed.
    """

    def __init__(self, root: Path | None = None):
        self.root = root if root is not None else _installed_root()
        self._trees: dict[str, ast.Module] = {}

    def version(self) -> str:
        """The version the package says it has, else what its installer recorded, else ``unknown``."""
        path = self.root / "_version.py"
        if path.exists():
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    if any(isinstance(t, ast.Name) and t.id == "__version__" for t in node.targets):
                        return str(node.value.value)
        try:
            return version("mlx-lm")
        except PackageNotFoundError:
            return "unknown"

    def tree(self, module: str) -> ast.Module:
        """The parsed module. Raises NotDefined when there is no such file."""
        if module not in self._trees:
            parts = module.split(".")[1:]
            path = self.root.joinpath(*parts).with_suffix(".py") if parts else self.root / "__init__.py"
            if not path.exists():
                raise NotDefined(f"mlx-lm has no module {module}")
            self._trees[module] = ast.parse(path.read_text(encoding="utf-8"), str(path))
        return self._trees[module]

    def definition(self, module: str, qualname: str) -> Definition:
        """The function or class that `qualname` names in `module`, followed through ``from .x import name``.

        Raises NotDefined.
        """
        head, _, rest = qualname.partition(".")
        node = self._top_level(module, head)
        while rest:
            head, _, rest = rest.partition(".")
            inner = [n for n in getattr(node, "body", []) if isinstance(n, Definition) and n.name == head]
            if not inner:
                raise NotDefined(f"{module} has no {qualname}")
            node = inner[-1]
        return node

    def imports_module(self, module: str, name: str) -> bool:
        """Whether `module` has a plain ``import name`` at its top level."""
        return any(
            alias.name == name and alias.asname is None
            for node in self.tree(module).body
            if isinstance(node, ast.Import)
            for alias in node.names
        )

    def _top_level(self, module: str, name: str) -> Definition:
        for node in self.tree(module).body:
            if isinstance(node, Definition) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        package = module.rpartition(".")[0]
                        return self._top_level(f"{package}.{node.module}", alias.name)
        raise NotDefined(f"{module} has no {name}")


def _installed_root() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("mlx-lm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def signature(node: Definition) -> str:
    """Parameters without annotations, ``name=`` where there is a default; for a class, of each of its methods."""
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        return "; ".join(f"{m.name}{signature(m)}" for m in methods)
    args = node.args
    positional = [a.arg for a in args.posonlyargs + args.args]
    first_default = len(positional) - len(args.defaults)
    parts = [name + "=" * (i >= first_default) for i, name in enumerate(positional)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [a.arg + "=" * (d is not None) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    return f"({', '.join(parts)})"


def body_hash(node: Definition) -> str:
    """16 hex digits over what the definition does: the same for every supported Python, whatever docstrings and layout."""
    digest = hashlib.sha256()
    for piece in _pieces(node):
        digest.update(piece.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _pieces(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED or value is None or value == []:
            if not (isinstance(node, ast.Constant) and name == "value"):
                continue
        if name == "body" and isinstance(node, Definition | ast.Module):
            value = _without_docstring(value)
        if name == "values" and isinstance(node, ast.JoinedStr):
            value = _joined(value)
        yield name
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _pieces(item)
            else:
                yield f"{type(item).__name__}:{item!r}"
    yield "."


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _joined(values: list[Any]) -> list[Any]:
    """The parts of an f-string with neighbouring texts merged and empty ones dropped, as parsers differ in this."""
    result: list[Any] = []
    for value in values:
        if not isinstance(value, ast.Constant) or value.value is None:
            result.append(value)
        elif result and isinstance(result[-1], str):
            result[-1] += str(value.value)
        elif value.value:
            result.append(str(value.value))
    return result
