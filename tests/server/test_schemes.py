"""KV schemes in real servers: batches stay on, every tier and every kind of request gives the same tokens, wrong flags end the start."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from families import write_model_dir

from mlx_lm_tiered.bench.server import Server
from support.models import ENDLESS, document
from support.server import tiered

# Past the windows of 64 tokens; two pairs share a beginning.
TEXTS = [document(500), document(500) + " It is", document(120, start=900), document(300, start=2000)]
LONGER = TEXTS[0] + " and the other"
COUNTS = (24, 8, 16, 24)
RESTORE = ["--ssd-restore", "always"]


def ask(server: Server, text: str, count: int = 24, **options):
    return server.complete(text, max_tokens=count, tokens=True, logit_bias=ENDLESS, **options)


def together(server: Server) -> list[list[int]]:
    """What requests of different lengths get that run at once."""
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return [answer.tokens for answer in pool.map(lambda text, count: ask(server, text, count), TEXTS, COUNTS)]


def short_ends_before_long(server: Server) -> bool:
    """Of two requests, of which the long one came first: only in a batch."""
    ended: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        for count in (300, 2):
            pool.submit(ask, server, document(200, start=4000 + count), count).add_done_callback(lambda _, count=count: ended.append(count))
            time.sleep(0.1)
    return ended == [2, 300]


def through_the_tiers(model, cache_dir, tmp_path, flags: list[str], converts: bool, alone=None, longer=None):
    """Cold, from RAM, outside the batch, and after a restart: the tokens of requests alone."""
    with tiered(model, cache_dir, *RESTORE, *flags, log=tmp_path / "first") as server:
        cold = [ask(server, text).tokens for text in TEXTS]
        assert alone is None or cold == alone
        hits = [ask(server, text) for text in TEXTS]
        assert [hit.tokens for hit in hits] == cold and all(hit.cached_tokens == hit.prompt_tokens - 1 for hit in hits)
        # A seed keeps a request out of the batch.
        assert [ask(server, text, seed=7).tokens for text in TEXTS] == cold
        stats = server.stats()
        assert stats["faults"] == {} and (stats["kv"]["conversions"] > 0) == converts
        assert 0 < stats["kv"]["predicted_bytes"] <= stats["kv"]["actual_bytes"]
        assert stats["kv"]["layers"].keys() == {"full", "window"}
        assert all(0 < kind["predicted_bytes"] <= kind["actual_bytes"] for kind in stats["kv"]["layers"].values())
        assert server.terminate() == 0
    with tiered(model, cache_dir, *RESTORE, *flags, log=tmp_path / "second") as server:
        assert together(server) == [tokens[:n] for tokens, n in zip(cold, COUNTS, strict=True)]
        assert short_ends_before_long(server)
        more = ask(server, LONGER)
        assert more.cached_tokens > 100 and more.tokens == (longer or more.tokens)
        assert server.stats()["hits_by_tier"]["ssd"] >= 3 and server.stats()["faults"] == {}
        assert server.terminate() == 0


def test_12_batches_and_tiers_answer_as_one_request_alone(tiny_gemma3, cache_dir, tmp_path):
    """And another scheme takes nothing of what is stored."""
    flags = ["--kv-scheme", "affine:4:32"]
    with tiered(tiny_gemma3, None, "--prompt-cache-bytes", "0", *flags, log=tmp_path / "alone") as server:
        alone = [ask(server, text).tokens for text in TEXTS]
        assert together(server) == [tokens[:n] for tokens, n in zip(alone, COUNTS, strict=True)]
        longer = ask(server, LONGER).tokens
    through_the_tiers(tiny_gemma3, cache_dir, tmp_path, flags, False, alone, longer)
    with tiered(tiny_gemma3, cache_dir, *RESTORE, "--kv-scheme", "affine:4:32@50", log=tmp_path / "other") as server:
        assert ask(server, TEXTS[0], 2).cached_tokens == 0


def test_6_and_12_upstreams_flags_on_gemma(tiny_gemma3, cache_dir, tmp_path):
    """Quantized when they hold 100 tokens, in the prefill of some requests and never of one."""
    through_the_tiers(tiny_gemma3, cache_dir, tmp_path, ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "100"], True)


def test_turboquant_beside_rings(cache_dir, tmp_path):
    """Rings stay plain; what a restart finds on disk, whole or a beginning of it, goes on as a request alone does."""
    model = write_model_dir("sliding64", tmp_path / "model")
    through_the_tiers(model, cache_dir, tmp_path, ["--kv-scheme", "turbo:k8v4@100"], True)


@pytest.mark.parametrize(("scheme", "starts"), [("affine:8:32", 1), ("turbo", 2)])
def test_4_quantized_caches_with_a_draft_model(tiny_llama, cache_dir, tmp_path, scheme, starts):
    model = tiny_llama if scheme != "turbo" else write_model_dir("dense64", tmp_path / "model")
    flags = ["--draft-model", str(model), "--num-draft-tokens", "3", "--kv-scheme", scheme, "--kernels", "off", *RESTORE]
    with tiered(model, None, "--prompt-cache-bytes", "0", "--kv-scheme", scheme, log=tmp_path / "plain") as server:
        expected = [ask(server, text).tokens for text in TEXTS]
        assert server.stats()["kv"]["kernels"] in ("none for this device", "on")
    for start in range(starts):
        with tiered(model, cache_dir, *flags, log=tmp_path / f"drafted-{start}") as server:
            assert [ask(server, text).tokens for text in TEXTS * (2 - start)] == expected * (2 - start)
            assert ask(server, TEXTS[0]).cached_tokens > 100
            stats = server.stats()
            assert stats["faults"] == {} and stats["kv"]["kernels"] == "off" and stats["kv"]["kernels_failed"] == 0
            assert (stats["hits_by_tier"]["ssd"] >= 3) == (start == 1)
            assert server.terminate() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-scheme", "affine:4", "--kv-bits", "4"], "both say how KV is stored"),
        (["--kv-scheme", "turbo"], "layer 0: heads of 32 have no TurboQuant form"),
        (["--kv-scheme", "affine:4:64"], "layer 0: heads of 32 cannot be cut into groups of 64"),
    ],
)
def test_wrong_flags_end_the_start_with_one_sentence(tiny_llama, flags, says):
    command = [sys.executable, "-m", "mlx_lm.server", "--plugin", "tiered", "--model", str(tiny_llama), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "error:" in line]
    assert says in line
