"""Places of upstream that several features rely on: where they are, and how they look. Seams say the rest.

A new version of mlx-lm that changes one of them is told of here, once.
"""

from __future__ import annotations

from typing import Any

BATCH_STEP: dict[str, Any] = dict(
    module="mlx_lm.generate",
    qualname="BatchGenerator._next",
    signature="(self)",
    bodies={"e30b1b2f10786f63": "0.32.0 0.32.1 0.32.2"},
)
SERVER_LOOP: dict[str, Any] = dict(
    module="mlx_lm.server",
    qualname="ResponseGenerator._generate",
    signature="(self)",
    bodies={"98ba981a08e49f20": "0.32.0", "a0a0f2233a3af2a8": "0.32.1 0.32.2"},
)
SERVER_GENERATE: dict[str, Any] = dict(
    module="mlx_lm.server",
    qualname="ResponseGenerator.generate",
    signature="(self, request, generation_args, progress_callback=)",
    bodies={"cb4823dab7cce110": "0.32.0 0.32.1 0.32.2"},
)
HANDLE_COMPLETION: dict[str, Any] = dict(
    module="mlx_lm.server",
    qualname="APIHandler.handle_completion",
    signature="(self, request, stop_words)",
    bodies={"d422d65e0f4ec1ca": "0.32.0", "7c18aab70ebe4378": "0.32.1 0.32.2"},
)
GENERATION_BATCH: dict[str, Any] = dict(
    module="mlx_lm.generate",
    qualname="GenerationBatch",
    signature=(
        "__init__(self, model, uids, inputs, prompt_cache, tokens, samplers, fallback_sampler, logits_processors, "
        "stop_sequences, max_tokens); __len__(self); extend(self, batch); _step(self); extract_cache(self, idx); "
        "filter(self, keep); next(self); empty(cls, model, fallback_sampler)"
    ),
    bodies={"069885ad9d1efb63": "0.32.0 0.32.1 0.32.2"},
)
GENERATE_STEP: dict[str, Any] = dict(
    module="mlx_lm.generate",
    qualname="generate_step",
    signature=(
        "(prompt, model, stream=, *, max_tokens=, sampler=, logits_processors=, max_kv_size=, prompt_cache=, "
        "prefill_step_size=, kv_bits=, kv_group_size=, quantized_kv_start=, prompt_progress_callback=, "
        "input_embeddings=)"
    ),
    bodies={"9650ac1357f3086b": "0.32.0 0.32.1 0.32.2"},
)
