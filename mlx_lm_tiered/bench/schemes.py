"""KV schemes side by side in this process: bytes, peak memory, speed, and how far their logits are from full precision's.

Every scheme prefills the same text alone, for its peaks; then all decode in turns, for
speeds that the machine's moods hit alike. ``decode_ratio_to_upstream`` is the median
over the turns of mlx-lm's time for a uniform scheme's format, from the first token in
its own QuantizedKVCache, to the scheme's; above 1 the scheme is faster.
``decode_ratio_to_bf16`` is the same against unquantized caches. The logits are
teacher-forced: the last half of a text, given its first half.

``logit_difference_to_upstream`` is the largest difference from the logits that mlx-lm's
own quantized caches give, in steps of 8 tokens, where its attention is taken;
``tiled_logit_difference`` that of a longer chunk behind them, which is computed in tiles:
what rounds differently there may be quantized to the next step in the layers above.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream

from mlx_lm_tiered.bench.text import first_tokens
from mlx_lm_tiered.progress import Progress
from mlx_lm_tiered.schemes.spec import Spec, parse

from .in_process import CHUNK, loaded, named, planned, scheme
from .quality import Quality

WARM_UP = 4
PIECE = 64


def run(model_path: Path, schemes: list[str], tokens: int = 4096, decode_tokens: int = 16, repeats: int = 5, text_tokens: int = 512) -> dict[str, Any]:
    """Measure it. Memory is bytes beside the weights, speeds tokens a second. Raises ValueError for a scheme that the model cannot have."""
    asked = named(schemes)
    specs = [spec for _, spec in asked]
    model, tokenizer = loaded(model_path, specs)
    prompt = first_tokens(tokenizer, tokens)
    quality = Quality(model, tokenizer, specs, text_tokens)
    rows, runners = [], {}
    for name, spec in asked:
        with Progress(name):
            plan = planned(model, spec, model_path)
            runner = Runner(model, spec)
            row = {"scheme": name, "bytes_per_token": plan.bytes_at(tokens) / tokens, **runner.prefill(prompt), **runner.peak_of_decode()}
            rows.append({**row, **quality.of(spec)[0]})
            runners[spec] = runner
    plain = runners.get(parse("bf16")) or _prefilled(Runner(model, parse("bf16")), prompt)
    theirs = {spec: _prefilled(Upstream(model, spec), prompt) for spec in specs if _has_upstream(spec, model)}
    times: dict[Any, list[float]] = {}
    for number in range(repeats):
        turns: list[Runner] = [plain, *(r for r in runners.values() if r is not plain), *theirs.values()]
        for place in range(len(turns)):
            runner = turns[(place + number) % len(turns)]
            times.setdefault(id(runner), []).append(runner.decode(decode_tokens))
    for spec, row in zip(specs, rows, strict=True):
        mine = times[id(runners[spec])]
        row["decode_tokens_s"] = decode_tokens / median(mine)
        row["decode_ratio_to_bf16"] = _ratio(times[id(plain)], mine)
        row["decode_ratio_to_upstream"] = _ratio(times[id(theirs[spec])], mine) if spec in theirs else None
        row.update(_differences(model, spec, quality.text[: 2 * PIECE]) if spec in theirs else {})
    return {"bench": "schemes", "model": model_path.name, "tokens": tokens, "decode_tokens": decode_tokens, "repeats": repeats, "rows": rows}


class Runner:
    """One way to store KV, and a sequence in it."""

    def __init__(self, model: Any, spec: Spec):
        self.model, self.spec = model, spec
        self.caches: list[Any] = []
        self._next = mx.array([[1]])

    def begin(self) -> list[Any]:
        return upstream.make_prompt_cache(self.model)

    def prefill(self, tokens: list[int]) -> dict[str, float]:
        """Run the prompt as mlx-lm does; its peak beside what was there before, and its speed."""
        before = _fresh_peak()
        started = time.perf_counter()
        with scheme(self.spec):
            from mlx_lm.generate import generate_step

            self.caches = self.begin()
            for token, _ in generate_step(mx.array(tokens), self.model, max_tokens=1, prefill_step_size=CHUNK, prompt_cache=self.caches):
                self._next = mx.array([[int(token)]])
        seconds = time.perf_counter() - started
        return {"prefill_peak_bytes": mx.get_peak_memory() - before, "prefill_tokens_s": len(tokens) / seconds}

    def decode(self, count: int) -> float:
        """Seconds for that many tokens, each fed back, one at a time."""
        with scheme(self.spec):
            self._step()
            started = time.perf_counter()
            for _ in range(count):
                self._step()
            return time.perf_counter() - started

    def _step(self) -> None:
        self._next = mx.argmax(self.model(self._next, cache=self.caches)[:, -1:], axis=-1)
        mx.eval(self._next)

    def peak_of_decode(self) -> dict[str, float]:
        """The peak of a few steps, caches included."""
        held = sum(cache.nbytes for cache in self.caches)
        before = _fresh_peak()
        self.decode(WARM_UP)
        return {"decode_peak_bytes": mx.get_peak_memory() - before + held}


class Upstream(Runner):
    """mlx-lm's own quantized caches and attention."""

    def __init__(self, model: Any, spec: Spec):
        super().__init__(model, parse("bf16"))
        self._affine = spec.affine

    def begin(self) -> list[Any]:
        assert self._affine is not None
        return [upstream.QuantizedKVCache(group_size=self._affine.group_size, bits=self._affine.bits) for _ in self.model.layers]


def _prefilled(runner: Runner, prompt: list[int]) -> Runner:
    runner.prefill(prompt)
    runner.decode(WARM_UP)
    return runner


def _has_upstream(spec: Spec, model: Any) -> bool:
    """Whether mlx-lm can store the same: plain caches everywhere, a width that it allocates rightly, and not on CUDA."""
    works = mx.default_device().type == mx.cpu or mx.metal.is_available()
    plain = all(type(cache) is upstream.KVCache for cache in upstream.make_prompt_cache(model))
    return works and plain and spec.affine is not None and spec.start == 0 and spec.affine.bits in (2, 4, 8)


def _differences(model: Any, spec: Spec, tokens: list[int]) -> dict[str, float]:
    """Of logits from mlx-lm's own over the same text: a first half in steps of 8 tokens, and a second in one chunk."""
    half = len(tokens) // 2
    parts = [mx.array([tokens[at : min(at + 8, half)]]) for at in range(0, half, 8)] + [mx.array([tokens[half:]])]
    seen = []
    for runner in (Upstream(model, spec), Runner(model, spec)):
        with scheme(runner.spec):
            caches = runner.begin()
            seen.append([model(part, cache=caches) for part in parts])
            mx.eval(seen[-1])
    differences: list[Any] = [mx.abs(a - b).max().item() for a, b in zip(*seen, strict=True)]
    *steps, tiles = differences
    return {"logit_difference_to_upstream": max(steps), "tiled_logit_difference": tiles}


def _ratio(other: list[float], mine: list[float]) -> float:
    return median(a / b for a, b in zip(other, mine, strict=True))


def _fresh_peak() -> int:
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
