"""Real stores on this machine for as long as they are needed: nginx with WebDAV, and moto's S3 server, where they are installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from .server import reserved_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
WEBDAV_MODULES = tuple(Path(folder) / "ngx_http_dav_ext_module.so" for folder in ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules"))
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}

CONFIG = """
{modules}
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log crit;
events {{}}
http {{
  access_log off; client_max_body_size 0; client_body_temp_path {folder}/tmp;
  proxy_temp_path {folder}/tmp; fastcgi_temp_path {folder}/tmp; uwsgi_temp_path {folder}/tmp; scgi_temp_path {folder}/tmp;
  server {{
    listen 127.0.0.1:{port}; root {folder}/objects;
    location / {{ dav_methods PUT DELETE MKCOL COPY MOVE; {ext} create_full_put_path on; dav_access user:rw; }}
  }}
}}
"""


class Store(NamedTuple):
    """A store's URL, the environment that its clients need, and where its server listens."""

    url: str
    env: Mapping[str, str]
    port: int = 0

    def at(self, port: int) -> Store:
        """The same behind a proxy."""
        return Store(self.url.replace(f":{self.port}/", f":{port}/"), {name: value.replace(f":{self.port}", f":{port}") for name, value in self.env.items()}, port)


@contextmanager
def webdav(folder: Path) -> Iterator[Store]:
    """nginx over a folder. Raises OSError when it does not start."""
    assert NGINX is not None
    for name in ("objects", "tmp"):
        (folder / name).mkdir(parents=True)
    module = next((path for path in WEBDAV_MODULES if path.exists()), None)
    ext = "dav_ext_methods PROPFIND OPTIONS;" if module is not None else ""
    with reserved_port() as held:
        port = held.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(modules=f"load_module {module};" if module else "", folder=folder, port=port, ext=ext))
    with _running([NGINX, "-e", str(folder / "error.log"), "-c", str(config)], folder / "nginx.log", port):
        yield Store(f"http://127.0.0.1:{port}/cache", {}, port)


@contextmanager
def s3(folder: Path) -> Iterator[Store]:
    """moto's S3 server, with one bucket. Raises OSError when it does not start."""
    with reserved_port() as held:
        port = held.getsockname()[1]
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], folder / "moto.log", port):
        with urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT"), timeout=30):
            pass
        yield Store("s3://bucket/cache", {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}, port)


@contextmanager
def _running(command: Sequence[str], log: Path, port: int, timeout: float = 60.0) -> Iterator[None]:
    """A server process, once it listens."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        end = time.monotonic() + timeout
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise OSError(f"{command[0]} did not start: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
