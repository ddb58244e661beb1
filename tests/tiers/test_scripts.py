"""Scripts as processes of their own, and what they do that a server does not."""

import subprocess
import sys

FORKING = """
import os, sys
import mlx_lm_tiered
from mlx_lm_tiered import openblas
openblas.load()
mlx_lm_tiered.enable(ssd_cache=sys.argv[1])
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
model, _ = load(sys.argv[2])
list(generate_step(mx.array(list(range(5, 200))), model, max_tokens=2))
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(os.listdir(sys.argv[1] + "/writers")))
"""


def test_a_forked_child_ends_at_once_and_leaves_saving_to_its_parent(tiny_llama, cache_dir):
    argv = [sys.executable, "-c", FORKING, str(cache_dir), str(tiny_llama)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["7", "1"]
    assert len(list(cache_dir.rglob("*.safetensors"))) == 1
