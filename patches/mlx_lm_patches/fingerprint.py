"""``python -m mlx_lm_patches.fingerprint [DIR ...]``: signatures and body hashes of every seam, for whoever adds a version.

Without arguments of the installed mlx-lm, else of each directory that is an
``mlx_lm`` package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .features import SEAMS
from .seam import check
from .source import Sources


def main(argv: list[str]) -> None:
    for sources in [Sources(Path(root)) for root in argv] or [Sources()]:
        print(f"mlx-lm {sources.version()} in {sources.root}")
        for seam in SEAMS:
            report = check(seam, sources)
            print(f"{report.state:13} {seam.feature:11} {report.extra.get('body', '-'):17} {seam.name}{report.extra.get('signature', '')}")


if __name__ == "__main__":
    main(sys.argv[1:])
