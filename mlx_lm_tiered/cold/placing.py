"""What happens around a new entry's file when it is put in place: which files stay, which go. All under the directory's lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .catalog import Catalog, ColdEntry
from .checking import BadEntry
from .directory import Directory
from .family import NAME_DIGITS, parent_name
from .meta import Meta
from .scan import read_segment
from .segments import inode


def continued_file(directory: Directory, catalog: Catalog, path: Path) -> ColdEntry | None:
    """The entry of the same tokens as `path` that is on disk and that others continue: it must stay, and nothing take its place. Raises OSError."""
    names, children = directory.family(path.parent)
    name = path.name[:NAME_DIGITS]
    if not children[name]:
        return None
    for there in names.get(name, ()):
        known = catalog.at(there)
        if known is not None and all(inode(one.path) == one.inode for one in known.chain):
            return known
        try:
            segment = read_segment(there)
        except (BadEntry, OSError):
            continue  # nobody can use it, so it may be replaced
        meta = segment.meta
        parent = catalog.parent_for(meta.fingerprint, meta.parent, meta.parent_checksum) if meta.start else None
        if (found := segment.entry(parent)) is not None and catalog.add(found):
            return found
    return None


def remove_superseded(directory: Directory, catalog: Catalog, entry: ColdEntry, meta: Meta) -> Iterator[ColdEntry]:
    """Remove the files that an entry makes superfluous and that no other needs; yields the shorter entries among them. Raises OSError."""
    names, children = directory.family(entry.path.parent)
    for twin in names.get(entry.name, ()):
        if twin != entry.path:
            twin.unlink(missing_ok=True)
            catalog.forget(twin)
            children[parent_name(twin)] -= 1
    for ancestor in reversed(catalog.superseded(meta, entry.key)):
        if children[ancestor.name] == 0:
            ancestor.path.unlink(missing_ok=True)
            catalog.forget(ancestor.path, ancestor)
            children[parent_name(ancestor.path)] -= 1
            yield ancestor
