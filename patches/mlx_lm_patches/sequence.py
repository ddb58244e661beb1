"""A generation outside a batch with a plugin's speculation: `generate_step`'s loop, with the tokens of several steps in one where drafts were right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm_hooks.speculation import Speculator

from . import asked, usage
from .drawing import Drawing
from .progress import Progress
from .runtime import Runtime
from .singly import Remembers


def speculating(original: Callable[..., Any], parameters: inspect.Signature, runtime: Runtime) -> Callable[..., Any]:
    """`generate_step` with speculation; `original` itself when no plugin has any."""
    if runtime.speculation is None:
        return original

    def generate_step(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        return _generate(original, call.arguments, runtime) if runtime.active and _fits(call.arguments, runtime) else original(*args, **kwargs)

    return generate_step


def _fits(options: dict[str, Any], runtime: Runtime) -> bool:
    """Not where caches are converted between two tokens, images stand for tokens, or a checkpoint may be taken at each token."""
    scheme = runtime.scheme
    converted = options["kv_bits"] is not None or (scheme is not None and scheme.start > 0 and scheme.converts(options["model"]))
    return not (converted or options["max_tokens"] == 0 or options["input_embeddings"] is not None or isinstance(options["sampler"], Remembers))


def _generate(original: Callable[..., Any], options: dict[str, Any], runtime: Runtime) -> Iterator[Any]:
    import mlx.core as mx
    from mlx_lm.generate import make_prompt_cache
    from mlx_lm.sample_utils import greedy_sampler

    if options["prompt_cache"] is None:
        options["prompt_cache"] = make_prompt_cache(options["model"], max_kv_size=options["max_kv_size"])
    first = _First(options["sampler"] or greedy_sampler)
    for _ in original(**{**options, "max_tokens": 0, "sampler": first}):
        raise AssertionError("a prefill without tokens to generate gave one")
    progress = options["prompt_progress_callback"]
    prompt = list(progress.tokens) if isinstance(progress, Progress) else options["prompt"].tolist()
    row = SequenceRow(options, prompt, first.token, first.logprobs, _args(runtime))
    with mx.stream(options["stream"]):
        speculator = _begun(runtime, row)
    handed = 0
    burst: list[Any] = []
    speculated = False
    try:
        while not row.ended:
            with mx.stream(options["stream"]):
                speculated = speculator is not None and speculator.advance(row)
                if not speculated:
                    row.step()
            burst, row.burst = row.burst, []
            for count, (token, logprobs) in enumerate(burst):
                handed = count + 1
                yield token, logprobs
                if (row.count - len(burst) + count) % 256 == 0:
                    mx.clear_cache()
    finally:
        if speculator is not None:
            if speculated and handed < len(burst):
                # Who closes has seen the tokens up to here, and the caches must hold no more.
                with mx.stream(options["stream"]):
                    speculator.rewind(row, handed)
            engine = runtime.here.engine
            if engine is not None and engine.current is not None:
                usage.tell(runtime, engine.current.context, speculator)
            with mx.stream(options["stream"]):
                usage.end(runtime, speculator)


def _args(runtime: Runtime) -> Any:
    """Upstream's arguments of the server's request that is served now; None in a script."""
    engine = runtime.here.engine
    return engine.current.args if engine is not None and engine.current is not None else None


def _begun(runtime: Runtime, row: SequenceRow) -> Speculator | None:
    try:
        assert runtime.speculation is not None
        return runtime.speculation.begin(row.model, row)
    except Exception as error:
        runtime.fault("beginning to speculate", error)
        return None


class _First:
    """A sampler that keeps what it was given and gave last."""

    def __init__(self, sampler: Callable[[Any], Any]):
        self._sampler = sampler
        self.token: Any = None
        self.logprobs: Any = None

    def __call__(self, logprobs: Any) -> Any:
        self.logprobs, self.token = logprobs.squeeze(0), self._sampler(logprobs)
        return self.token


class SequenceRow(Drawing):
    """Implements the contract's `SpeculativeRow` as `generate_step` samples. `burst` has what was emitted and not handed out yet."""

    def __init__(self, options: dict[str, Any], tokens: list[int], token: Any, logprobs: Any, args: Any = None):
        from mlx_lm.sample_utils import greedy_sampler

        self.model, self.caches, self.tokens = options["model"], options["prompt_cache"], tokens
        self.count = 0  # emitted
        self.burst: list[tuple[int, Any]] = []
        self._most = options["max_tokens"]
        self._sampler = options["sampler"] or greedy_sampler
        self._processors = options["logits_processors"] or ()
        self._seeded = getattr(args, "seed", None) is not None
        self.draft_tokens = asked.drafts(args)
        self._context = options["prompt"]
        self._ahead = [(token, logprobs)]  # the pending token (1,) with its log-probabilities (vocabulary), and those sampled behind it
        self._pending: int | None = None

    @property
    def ended(self) -> bool:
        return self.count == self._most

    @property
    def pending(self) -> int:
        if self._pending is None:
            self._pending = int(self._ahead[0][0].item())
        return self._pending

    @property
    def room(self) -> int:
        return self._most - self.count - 1 if self._most >= 0 else 1 << 30

    def sample(self, logits: Any, sampler: Callable[[Any], Any] | None = None) -> list[int]:
        import mlx.core as mx

        sampled, rows = self._sampled(logits, sampler or self._sampler)
        mx.eval(sampled, rows)
        return sampled.tolist()

    def emit(self) -> bool:
        token, logprobs = self.pending, self._ahead.pop(0)[1]
        self._pending = None
        self.tokens.append(token)
        self.burst.append((token, logprobs))
        self.count += 1
        return self.ended

    def step(self) -> None:
        """One token without speculation, the next one computed meanwhile, as upstream does."""
        import mlx.core as mx

        sampled, rows = self._sampled(self.model(self._ahead[0][0][None], cache=self.caches)[:, -1, :], self._sampler)
        mx.async_eval(sampled, rows)
        self.emit()

    def _sampled(self, logits: Any, sampler: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        import mlx.core as mx

        del self._ahead[1:]
        if self._processors:
            self._context = mx.concatenate([self._context, self._ahead[0][0]])
            for processor in self._processors:
                logits = processor(self._context, logits)
        # Over one row as upstream does it, to the last bit: a sampler may look at it.
        logprobs = logits - mx.logsumexp(logits, axis=None if logits.shape[0] == 1 else -1, keepdims=True)
        sampled, rows = sampler(logprobs), list(logprobs)
        self._ahead += [(sampled[at : at + 1], row) for at, row in enumerate(rows)]
        return sampled, rows
