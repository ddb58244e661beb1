#!/usr/bin/env python3
"""Compute what Hugging Face transformers gives for the tests' assistants.

    python make_assistant_golden.py

Needs transformers 5.24 and torch (the CPU's is enough), in an environment of its own;
mlx is not used. The artifacts are those of `assistants.py`, made of seeds; they are
loaded by transformers from their files, as a user's would be. Writes
`assistant.safetensors` beside this file: for each kind and number of tokens the logits
and the next hidden state of two drafts in float32, the second from the first one's
hidden state, at the same position, as transformers' candidate generator does it.

For prompts beyond the window the sliding keys are given twice: whole, so that
transformers' own mask cuts them, and as the newest of them, so that it does not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import assistants  # noqa: E402

# Longer ones compare the two libraries' RoPE: in float32 its angles are off by 2e-6 at position 200, and these layers make ten times that of it.
LENGTHS = (5, 40)


def main() -> None:
    made: dict[str, np.ndarray] = {}
    rounding = 0.0
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for kind in assistants.KINDS:
            directory = assistants.write(Path(scratch) / kind, assistants.config(kind), assistants.tensors(kind))
            single, double = (load(kind, directory, dtype) for dtype in (torch.float32, torch.float64))
            for tokens in LENGTHS:
                whole = assistants.borrowed(kind, tokens)
                cut = dict(whole, sliding_attention=tuple(side[:, :, -assistants.WINDOW :] for side in whole["sliding_attention"]))
                for form, borrowed in (("whole", whole), ("cut", cut)):
                    found, exact = (run(model, borrowed, tokens) for model in (single, double))
                    rounding = max(rounding, *(np.abs(found[name] - exact[name]).max() for name in found if name.startswith("0.")))
                    made |= {f"{kind}.{tokens}.{form}.{name}": array for name, array in found.items()}
    save_file(made, str(HERE / "assistant.safetensors"), {"transformers": transformers.__version__, "torch": torch.__version__})
    (HERE / "assistant.safetensors").chmod(0o644)
    print(f"{len(made)} arrays; the first drafts are within {rounding:.1e} of those in float64")


def load(kind: str, directory: Path, dtype: torch.dtype):
    name = assistants.config(kind)["architectures"][0]
    model, loading = getattr(transformers, name).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    wrong = {what: names for what, names in loading.items() if names}
    if wrong:
        raise SystemExit(f"{kind}: {wrong}")
    return model.eval()


def run(model, borrowed: dict, position: int) -> dict[str, np.ndarray]:
    """Two drafts."""
    first, hidden, second = (torch.from_numpy(array).to(model.dtype) for array in assistants.inputs())
    states = {name: tuple(torch.from_numpy(np.ascontiguousarray(side)).to(model.dtype) for side in pair) for name, pair in borrowed.items()}
    found = {}
    for draft, embedded in enumerate((first, second)):
        out = model(inputs_embeds=torch.cat([embedded, hidden], dim=-1), position_ids=torch.tensor([[position]]), shared_kv_states=states)
        hidden = out.last_hidden_state
        found[f"{draft}.logits"] = out.logits.numpy().copy()
        found[f"{draft}.hidden"] = hidden.numpy().copy()
    return found


if __name__ == "__main__":
    main()
