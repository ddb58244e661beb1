"""Run prompts through models with mlx-lm as it is, or with the plugin; started by the tests as a process of its own.

    child.py RUN.json

RUN.json: {"families": {name: model directory}, "prompts": [[name of the run, tokens], ...],
"settings": {...} or null, "more": tokens to generate, "out": file.npz}. Writes
per family and run the tokens, the log-probabilities and the reused tokens by tier.
"""

import json
import sys

import numpy as np

import mlx_lm_tiered
from mlx_lm_tiered import openblas

openblas.load()

if __name__ == "__main__":
    run = json.load(open(sys.argv[1]))
    if run["settings"] is not None:
        mlx_lm_tiered.enable(**run["settings"])

    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    out = {}
    for family, directory in run["families"].items():
        model, _ = load(directory)
        for name, tokens in run["prompts"]:
            before = mlx_lm_tiered.stats()
            steps = list(generate_step(mx.array(tokens), model, max_tokens=run["more"]))
            out[f"{family}/{name}/tokens"] = np.array([token for token, _ in steps])
            out[f"{family}/{name}/logprobs"] = np.stack([np.array(logprobs) for _, logprobs in steps])
            if before is not None:
                after = mlx_lm_tiered.stats()
                for tier in ("ram", "ssd"):
                    reused = after["tokens_saved_by_tier"][tier] - before["tokens_saved_by_tier"][tier]
                    out[f"{family}/{name}/{tier}"] = np.array(reused)
    if (report := mlx_lm_tiered.stats()) is not None:
        out["faults"] = np.array(json.dumps(report["faults"]))
    np.savez(run["out"], **out)
