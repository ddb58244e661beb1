"""A server of several ranks on this machine: ``mlx.launch`` with the ring backend over the loopback address. Linux only."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .server import LOG_TAIL, STOCK, Server, ServerFailed

# It looks without a pause whether it can write to its processes, until one of them reads no more. (mlx 0.32.4; it takes half a core.)
DEAF = ("sh", "-c", 'exec "$@" </dev/null', "sh")
# The program `mlx.launch`, which need not be on the path.
LAUNCH = (sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()")


class RankedServer(Server):
    """A `Server` whose process is the launcher. Signals go to a rank or to the launcher; it has ended when all ranks have."""

    def __init__(
        self, model: str | os.PathLike[str], log: str | os.PathLike[str], flags: Sequence[str] = (), *,
        ranks: int = 2, backend: str = "ring", env: Mapping[str, str | None] | None = None, wait: bool = True,
    ):  # fmt: skip
        self.ranks = ranks
        launch = [*LAUNCH, "-n", str(ranks), "--backend", backend]
        if backend == "ring":
            launch += ["--starting-port", str(_ports(ranks))]
        self._pids: dict[int, int] = {}
        # Its input stays open: at its end the launcher would read it again and again.
        super().__init__(model, log, flags, env=env, command=[*launch, "--", *DEAF, *STOCK], wait=wait, stdin=subprocess.PIPE)

    @property
    def pids(self) -> dict[int, int]:
        """The processes by rank, once they run."""
        for pid in _children(self.process.pid) if len(self._pids) < self.ranks else ():
            with suppress(OSError):
                names = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item)
                if "MLX_RANK" in names:
                    self._pids[int(names["MLX_RANK"])] = pid
        return self._pids

    @property
    def running(self) -> bool:
        return super().running or any(_alive(pid) for pid in self._pids.values())

    def wait_healthy(self, timeout: float = 120.0) -> float:
        seconds = super().wait_healthy(timeout)
        deadline = time.monotonic() + timeout
        while len(self.pids) < self.ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return seconds

    def signal(self, number: int, rank: int | None = 0) -> None:
        """To a rank, or to the launcher (None)."""
        os.kill(self.process.pid if rank is None else self.pids[rank], number)

    def wait_ended(self, timeout: float = 150.0) -> float:
        """Wait until all processes have ended; returns the seconds. Raises ServerFailed, and ends what is left, after `timeout`."""
        started = time.monotonic()
        while self.running:
            if time.monotonic() - started > timeout:
                self.kill()
                raise ServerFailed(f"the ranks did not end within {timeout:g} s\n{self.log()[-LOG_TAIL:]}")
            time.sleep(0.02)
        self._close()
        return time.monotonic() - started

    def terminate(self, timeout: float = 150.0, rank: int | None = 0) -> int:
        """SIGTERM to a rank or to the launcher, then wait for the end of all. 0 when each rank ended with 0, as the launcher says."""
        self.signal(signal.SIGTERM, rank)
        self.wait_ended(timeout)
        return int("Node with rank" in self.log())

    def kill(self) -> None:
        for pid in (self.process.pid, *self.pids.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while self.running:
            time.sleep(0.01)
        self._close()

    def _close(self) -> None:
        self._port.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def plain(model: str | os.PathLike[str], log: str | os.PathLike[str], *flags: str) -> RankedServer:
    """The same without the plugin."""
    return RankedServer(model, log, flags, env={"MLX_LM_PLUGINS": None})


def _ports(count: int) -> int:
    """The first of as many free ports in a row, below those that the system hands out: mlx binds them some time later."""
    while True:
        start = random.SystemRandom().randrange(12_000, 30_000)
        try:
            for port in range(start, start + count):
                with socket.socket() as held:
                    held.bind(("127.0.0.1", port))
            return start
        except OSError:
            continue


def _children(pid: int) -> list[int]:
    """Processes that any thread of this one has started."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
