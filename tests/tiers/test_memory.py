"""Fault 26: a restored prefix is in memory once, from the file to the first token."""

import subprocess
import sys

CHILD = """
import sys
import mlx_lm_tiered
from mlx_lm_tiered import openblas
openblas.load()
directory, model_path, what = sys.argv[1:]
mlx_lm_tiered.enable(ssd_cache=directory)
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm_tiered import caches as kinds
from mlx_lm_tiered.plugin import current
from mlx_lm_patches.features.loads import source_of

model, _ = load(model_path)
tokens = [5 + i * 7 % 900 for i in range(8192)]
if what == "fill":
    for _ in generate_step(mx.array(tokens), model, max_tokens=1):
        pass
    sys.exit()
prefixes = current().prefix_cache(None, None, "script")
source = source_of(model)
current().model_loaded(source)
for _ in generate_step(mx.array(tokens[:80]), model, max_tokens=2):
    pass  # compiled, and everything allocated that is not the prefix
mx.clear_cache()
before = mx.get_active_memory()
mx.reset_peak_memory()
taken = prefixes.take(source, tokens)
assert taken.length == len(tokens) - 1, taken.length
size = kinds.nbytes(taken.caches)
tensor = max(a.nbytes for c in taken.caches for a in (c.keys, c.values))
restoring = mx.get_peak_memory() - before
mx.reset_peak_memory()
generator = BatchGenerator(model)
caches = taken.caches
del taken
generator.insert_segments([[tokens[-1:]]], max_tokens=[3], caches=[caches], all_tokens=[tokens[:-1]])
del caches
while generator.next()[1] == []:
    pass
print(size, tensor, restoring, mx.get_peak_memory() - before)
"""


def child(*args):
    done = subprocess.run([sys.executable, "-c", CHILD, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_memory_from_the_file_to_the_first_token(tiny_llama, cache_dir):
    child(cache_dir, tiny_llama, "fill")
    size, tensor, restoring, first_token = map(int, child(cache_dir, tiny_llama, "restore").split())
    assert size > 12 * 10**6
    assert restoring <= size + tensor
    # The first token's own activations come on top; a second copy of the prefix would be `size` more.
    assert first_token <= size + tensor + size // 4
