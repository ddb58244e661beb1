"""``mlx_lm.tiered bench concurrent`` with small numbers: a batch under a KV scheme against mlx-lm's own quantized caches, one request at a time."""

from __future__ import annotations

import json

from mlx_lm_tiered.cli import main
from support.models import TINY


def test_requests_at_once_are_decoded_together_and_measured_against_upstream(tmp_path, capsys):
    file = tmp_path / "figures.json"
    # Long enough: while rows decode, mlx-lm looks for other requests every half a second.
    options = ["--scheme", "affine:4:32", "--requests", "3", "--prefix-tokens", "100", "--decode-tokens", "500", "--repeats", "1"]
    assert main(["bench", "concurrent", "--model", str(TINY["llama"]), *options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    # How many are decoded together at most; mlx-lm's server under --kv-bits has one at a time.
    assert found["at_once"] == 3
    assert found["concurrent_to_sequential"] == found["sequential_s"] / found["concurrent_s"] > 0
    assert found["upstream"] == "--kv-bits 4 --kv-group-size 32 --quantized-kv-start 0" and found["prompt_tokens"] > 90
    assert "concurrent_to_sequential" in capsys.readouterr().out


def test_a_scheme_that_upstream_does_not_have_is_refused(capsys):
    assert main(["bench", "concurrent", "--model", str(TINY["llama"]), "--scheme", "config"]) == 2
    assert "cannot be asked of mlx-lm itself" in capsys.readouterr().err
