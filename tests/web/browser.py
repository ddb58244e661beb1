"""A real Chromium, without a window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no Chromium here (Debian's package is called chromium)"
# Where to leave pictures of the page; the documentation's are made with docs/images.
PICTURES = os.environ.get("MLX_LM_TIERED_SCREENSHOTS")


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser. Its driver and the browser do without what a test has preloaded."""
    from playwright.sync_api import sync_playwright

    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND, args=["--no-sandbox", "--disable-gpu"], env=env)
        try:
            yield browser
        finally:
            browser.close()


def picture(page: Any, name: str, **options: Any) -> None:
    """Leave a picture, if pictures are wanted."""
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(PICTURES) / name), **options)


def violations(page: Any) -> list[str]:
    """What axe finds wrong for those who do not see or point."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html']}" for one in found]
