"""A restore in the background beside a generation thread that is inside mlx: neither waits for the other for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = """
import sys, threading, time
import mlx.core as mx
from mlx_lm_tiered import openblas; openblas.load()
from cold_helpers import FINGERPRINT, job, grown, save, scanned, same
from mlx_lm_tiered.index.keys import token_key

from pathlib import Path
store = scanned(Path(sys.argv[1]))
save(store, job(range(400), grown(400, layers=8)))
found = store.find(FINGERPRINT, "", token_key(range(400)), 400)
restored = []

def restore():
    until = time.monotonic() + 1
    while time.monotonic() < until or len(restored) < 5:
        restoring = store.restoring(found.entry)
        for _ in restoring.steps():
            continue
        restored[5:] = [restoring]

thread = threading.Thread(target=restore)
thread.start()
while thread.is_alive():
    mx.eval(mx.ones((64, 64)) + 1)
    # As upstream after each chunk of a prefill: it waits for all streams and keeps the interpreter to itself.
    mx.clear_cache()
assert all(same(one.caches(), grown(400, layers=8)) for one in restored)
"""


def test_the_interpreter_is_not_needed_for_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    child = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "c"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
