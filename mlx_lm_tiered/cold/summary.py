"""What the index needs of a file, read quickly: who it belongs to, which tokens, whom it continues.

The header's checksum is compared, so chance changes are noticed, and what is used is
checked. The table of tensors is not looked through: `format.parse` does that before
anything is restored.
"""

from __future__ import annotations

import json
import os

from . import format as fmt
from .checking import BadEntry, ForeignEntry, encodable, number_of
from .meta import TOKENS, Meta

AT_ONCE = 16 << 10  # bytes read first: most headers are shorter


def read_summary(fd: int, size: int) -> tuple[Meta, str, int, str]:
    """The meta, without its tensors unless there is companion state, the file's checksum, where the body starts, and the tokens' checksum. Raises BadEntry, OSError."""
    data = os.pread(fd, AT_ONCE, 0)
    length = fmt.header_length(data[:8], size)
    while len(data) < length:
        more = os.pread(fd, length - len(data), len(data))
        if not more:
            raise BadEntry("The file ends too early.")
        data += more
    header = data[:length]
    checksum = fmt.check_seal(header)
    try:
        table = json.loads(header[8:])
        texts = table["__metadata__"]
        last = next(reversed(table.values()))
        end, tokens = last["data_offsets"][1], table[TOKENS]
        if texts["format"] != fmt.FORMAT:
            raise BadEntry("The file is not an entry of this program.")
        if texts["version"] == fmt.COMPANION_VERSION:  # few, and more to look at
            found = fmt.parse(header, size)
            return found.meta, checksum, length, found.checksums[0]
        if texts["version"] != fmt.VERSION:
            raise ForeignEntry("The file has another format version.")
        meta = Meta(
            fingerprint=texts["fingerprint"], namespace=texts["namespace"], length=number_of(texts, "length"), tensors=(), descriptors=None,
            cuttable=texts["cuttable"] == "true", minimum_reusable=number_of(texts, "minimum_reusable"), role=texts["role"],
            created=number_of(texts, "created"), start=number_of(texts, "start"), parent=texts["parent"], parent_checksum=texts["parent_checksum"],
        )  # fmt: skip
        sums, own = texts["checksums"][:16], meta.length - meta.start
        named = fmt.continues(meta.start, meta.parent, meta.parent_checksum)
        sound = named and own > 0 and meta.minimum_reusable <= meta.length and end == size - length
        if not sound or tokens != {"dtype": "I64", "shape": [own], "data_offsets": [0, 8 * own]} or len(sums) != 16 or 8 * own > end:
            raise BadEntry("The header contradicts itself or the file's size.")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, StopIteration, RecursionError) as error:
        raise BadEntry("The header is not that of an entry.") from error
    if not all(isinstance(text, str) and encodable(text) for text in (meta.fingerprint, meta.namespace, meta.role, sums)):
        raise BadEntry("The metadata holds something that is not a string.")
    return meta, checksum, length, sums
