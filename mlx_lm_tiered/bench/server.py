"""A real ``mlx_lm server`` process: started, watched, stopped.

Standard library only; nothing of mlx is loaded in the calling process. `Client`
(in ``client.py``) speaks to it over HTTP; `Server` adds the process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm_tiered import openblas

from .client import Client

if TYPE_CHECKING:
    from typing import Self

STOCK = (sys.executable, "-m", "mlx_lm", "server")
LOG_TAIL = 3000


class ServerFailed(Exception):
    """A server process did not start, or ended when it should not have. The text ends with its log's last lines."""


def reserved_port() -> socket.socket:
    """A socket on a free port of the loopback address, which the system gives to nobody else who lets it choose while the socket is open.

    On Linux a server can listen there all the same, as it asks for the address by
    number and with SO_REUSEADDR (``http.server`` does); elsewhere close the socket first.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def tiered_flags(directory: str | os.PathLike[str] | None, *more: str) -> list[str]:
    """The flags that switch the plugin on, with `directory` as its SSD tier (None: RAM only).

    What is there is restored, whether or not that pays on this machine, unless `more` says otherwise: that is what is measured.
    """
    ssd = [] if directory is None else ["--ssd-cache", str(directory)]
    if ssd and "--ssd-restore" not in more:
        ssd += ["--ssd-restore", "always"]
    return ["--plugin", "tiered", *ssd, *more]


def server_command() -> list[str]:
    """How a server with the plugin is started here: upstream's own command, or ours where the start-up file does not work."""
    from mlx_lm_hooks import find_host

    if find_host().start_up()["state"] == "ok":
        return list(STOCK)
    return [sys.executable, "-m", "mlx_lm_tiered.cli", "serve"]


class Server(Client):
    """A running server process. Used as a context manager it ends with SIGTERM, after an exception with SIGKILL.

    `flags` go to the server after ``--model`` and ``--port``; `env` is laid over
    this process's environment (None as a value removes a name); `command` is what
    is run in place of ``python -m mlx_lm server``. Its output goes to `log`, which
    is appended to. Raises ServerFailed when ``/health`` does not answer 200 within
    `start_timeout` seconds.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        log: str | os.PathLike[str],
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str | None] | None = None,
        command: Sequence[str] = STOCK,
        start_timeout: float = 120.0,
        wait: bool = True,
        stdin: int = subprocess.DEVNULL,
    ):
        # Held until the process is gone: it takes seconds to listen, and another's answers on its port would be taken for its own.
        self._port = reserved_port()
        super().__init__("127.0.0.1", self._port.getsockname()[1])
        if sys.platform != "linux":
            self._port.close()
        self.model = str(model)
        self.log_path = Path(log)
        self.argv = [*command, "--model", self.model, "--port", str(self.port), *flags]
        environment = openblas.preload_environment(os.environ)
        environment["PYTHONUNBUFFERED"] = "1"
        for name, value in (env or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        self.started = time.monotonic()
        with open(self.log_path, "ab") as out:
            self._log_start = out.tell()
            # A session of its own: a Ctrl-C in the terminal reaches the caller, which then ends the server in order.
            self.process = subprocess.Popen(
                self.argv, stdin=stdin, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        if wait:
            try:
                self.wait_healthy(start_timeout)
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if not self.running:
            self._port.close()
        elif kind is None:
            self.terminate()
        else:
            # Nobody waits for its answer any more, and a kill harms no entry.
            self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        """What this process has written so far, standard output and error together."""
        with open(self.log_path, "rb") as source:
            source.seek(self._log_start)
            return source.read().decode("utf-8", "replace")

    def wait_healthy(self, timeout: float = 120.0) -> float:
        """Wait until ``/health`` answers 200; returns the seconds since the process was started."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.running:
                raise ServerFailed(f"the server exited with code {self.process.returncode}\n{self.log()[-LOG_TAIL:]}")
            with suppress(OSError):  # Nothing listens yet: that is what is waited for.
                if self.healthy():
                    return time.monotonic() - self.started
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready after {timeout:g} s\n{self.log()[-LOG_TAIL:]}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def terminate(self, timeout: float = 150.0) -> int:
        """SIGTERM, then wait for the end. Returns the exit code; ServerFailed after `timeout` seconds."""
        self.signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"the server did not stop within {timeout:g} s\n{self.log()[-LOG_TAIL:]}") from None
        self._port.close()
        return code

    def kill(self) -> None:
        """SIGKILL, then wait for the end."""
        self.process.kill()
        self.process.wait()
        self._port.close()


def stock(model: str | os.PathLike[str], log: str | os.PathLike[str], *flags: str, **options: Any) -> Server:
    """An unmodified server: no plugin, whatever this process's environment says. `options` are those of `Server`."""
    options["env"] = {"MLX_LM_PLUGINS": None} | dict(options.get("env") or {})
    return Server(model, log, flags, **options)
