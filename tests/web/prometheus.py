"""A real Prometheus that scrapes one server, every second."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: mlx-lm
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
FOUND = shutil.which("prometheus")


class Prometheus:
    def __init__(self, url: str):
        self.url = url

    def query(self, expression: str) -> list[dict]:
        """An instant query's results. Raises HTTPError for an expression that cannot be read."""
        with urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}", timeout=10) as reply:
            found = json.load(reply)
        assert found["status"] == "success", found
        return found["data"]["result"]

    def value(self, expression: str) -> float:
        (only,) = self.query(expression)
        return float(only["value"][1])

    def until(self, expression: str, timeout: float = 30.0) -> None:
        """Wait until it has a result."""
        end = time.monotonic() + timeout
        while not self.query(expression):
            assert time.monotonic() < end, f"no result for {expression}"
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Prometheus]:
    """Scrape 127.0.0.1:`port`."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = probe.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(port=port))
    assert FOUND is not None
    command = [FOUND, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{own}"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 30
        while True:
            try:
                urlopen(f"http://127.0.0.1:{own}/-/ready", timeout=5).close()
                break
            except URLError:
                assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.1)
        yield Prometheus(f"http://127.0.0.1:{own}")
    finally:
        process.terminate()
        process.wait(20)
