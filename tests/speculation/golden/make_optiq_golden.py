"""What mlx-optiq 0.7.7 drafts and accepts for the tiny pairs of `pairs.py`: makes optiq_spec.json.

    python make_optiq_golden.py optiq_spec.json

mlx-optiq (PyPI) needs an environment of its own, as it pins transformers below 5.13. Of each run: tokens, accepted
drafts by round, and for every draft its position, the numbers of sliding and full keys, and the token. mlx-optiq has
each draft a position further, reads one key less than the window, and verifies without softcap; none of it changes a token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from pairs import V, cases, target, write_assistant

TOKENS = 40
PROMPTS = (5, 40)  # below and beyond the window of 16
GAMMAS = (1, 2, 4)


class Numbers:
    """As much of a tokenizer as spec_generate asks for."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids)) + " "


def run(model: Any, drafter: Any, prompt: list[int], gamma: int) -> dict[str, Any]:
    from optiq.runtime.spec import SpecConfig, spec_generate

    log, forward = [], drafter.forward

    def noted(**given: Any) -> Any:
        logits, hidden = forward(**given)
        lengths = [given["shared_kv"][kind][0].shape[-2] for kind in ("sliding_attention", "full_attention")]
        log.append([given["position"], *lengths, int(mx.argmax(logits))])
        return logits, hidden

    drafter.forward = noted
    tokens, drafted, stats = [], [], None
    for event in spec_generate(model, drafter, Numbers(), " ".join(map(str, prompt)), SpecConfig(gamma=gamma, max_tokens=TOKENS, eos_token_id=-1)):
        if event.kind == "token":
            tokens.append(event.token_id)
            drafted.append(event.from_draft)
        else:
            stats = event.stats
    drafter.forward = forward
    trace, right = [], 0
    for was_drafted in drafted[1:]:
        if was_drafted:
            right += 1
        else:
            trace.append(right)
            right = 0
    if right:
        trace.append(right)
    rounds = [log[at : at + gamma] for at in range(0, len(log), gamma)]
    assert stats is not None
    return {"tokens": tokens, "trace": trace, "rounds": rounds, "drafted": stats.n_drafted, "accepted": stats.n_accepted}


def main() -> None:
    from optiq.runtime.spec import GemmaAssistantDrafter

    mx.set_default_device(mx.cpu)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, head, kind in cases():
            model = target(name)
            drafter = GemmaAssistantDrafter.from_pretrained(str(write_assistant(Path(folder) / f"{name}-{head}-{kind}", name, head, kind, model)))
            for length in PROMPTS:
                prompt = np.random.default_rng(length).integers(1, V, length).tolist()
                for gamma in GAMMAS:
                    about = {"target": name, "head": head, "kind": kind, "plen": length, "gamma": gamma, "prompt": prompt}
                    runs.append(about | run(model, drafter, prompt, gamma))
    Path(sys.argv[1]).write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
