"""The values and protocols that cross between mlx-lm and a plugin."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from .requests import Served


class PluginError(Exception):
    """A plugin or the host cannot do what was asked; its text is one sentence."""


class UsageError(PluginError):
    """Wrong flags, environment or settings. Commands print the text and exit 2."""


class Refused(Exception):
    """A request cannot be served: HTTP status, one sentence for the client, seconds after which another try makes sense (None: it never does)."""

    def __init__(self, status: int, text: str, retry_after: int | None = None):
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class Invocation:
    """One start of an mlx-lm command, or of the plugins in a script.

    `command` is ``server``, ``generate``, ``chat`` or ``script``. `args` holds the
    parsed arguments; a plugin may change them. `given` has the names of the
    arguments that were given explicitly, as opposed to left at their defaults.
    `ranks` is there when several processes serve one model together.
    """

    command: str
    args: argparse.Namespace
    given: frozenset[str] = frozenset()
    ranks: Ranks | None = None


class Ranks(Protocol):
    """The processes that serve one model together (``mlx.launch``), each with a shard of it. Rank 0 answers HTTP.

    All of them run the same requests in the same order. What decides how a request is
    computed must be decided alike on all of them, never by one rank's memory, disk or clock.
    """

    @property
    def rank(self) -> int:
        """Which of them this process is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def sharding(self) -> str:
        """How the model is divided: ``tensor`` or ``pipeline``."""

    @property
    def complete(self) -> bool:
        """Whether they still serve together, as far as this one knows: none was lost."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank gave, in the order of ranks: as many 32-bit integers from each.

        Generation thread only. A collective: it returns when every rank has called it, so
        all must call it at the same places of the same requests, whatever has failed.
        """

    def answers(self, name: str, work: Callable[[Any], Any]) -> None:
        """Say what `ask` of this name does here. `work` runs on a thread of its own; argument and result are JSON."""

    def ask(self, name: str, argument: Any, timeout: float) -> list[Any]:
        """Have every rank do what `answers` named, and wait for the results, in the order of ranks.

        Rank 0 only, any thread but the generation thread. Raises TimeoutError when not all
        have answered in time, or can any more, and RuntimeError for what was raised there.
        """


@dataclass(frozen=True)
class ModelSource:
    """Which model a KV cache belongs to. Hashable; equal sources share caches.

    `path` is the local directory the weights were loaded from, None when the host
    could not see the load; then `key` alone (upstream's name for the model, or an
    object's identity) tells models of this process apart. `kv_scheme` says how
    upstream stores KV: ``plain``, or ``affine:BITS:GROUP@START``. `generation`
    counts the loads of this process, so that a directory changed between two loads
    is never mistaken for what it was. `shard` says which part of the model this process
    has, empty for all of it: ``tensor 0/2`` is that of rank 0 of two.
    """

    path: Path | None = None
    adapter_path: Path | None = None
    draft: ModelSource | None = None
    kv_scheme: str = "plain"
    key: Hashable = None
    generation: int = 0
    shard: str = ""


@dataclass(frozen=True)
class Companion:
    """State that a method keeps beside a prefix's caches: a draft's cache, a hidden row, a generation's position.

    It belongs to exactly the tokens that it was stored with, never to a shorter
    prefix. `schema` (lower-case letters, digits, ``.``, ``_``, ``-``) and `version`
    say how to read it, and who does not know them must not use it; `scalars` are JSON,
    `tensors` mlx arrays by name. The tiers keep it and do not interpret it.
    """

    schema: str
    version: int
    scalars: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)


class Taken(NamedTuple):
    """A reusable prefix: one cache per layer, holding the first `length` tokens.

    `companion` is what was stored with exactly these tokens, if anything was.
    """

    caches: list[Any]
    length: int
    companion: Companion | None = None


@dataclass(frozen=True)
class Admission:
    """A server's request that is about to be prefilled; nothing of it is computed yet.

    `tokens` is the whole prompt, of which `caches` (one a layer; None where they are
    not made yet) hold the first `cached`. `draft` is the draft model, or None. `max_tokens` bounds the
    reply (-1: nothing does), `step` the tokens of one forward pass. Of the other
    requests in the same batch, `decoding` has the tokens that each row holds, and
    `waiting` (tokens of the prompt, tokens held) of those admitted before. `preempted`
    is how often the request has left the batch (see `mlx_lm_room`), None where it cannot;
    one that comes back has what it replied behind its prompt.
    """

    source: ModelSource | None
    model: Any
    draft: Any
    tokens: Sequence[int]
    cached: int
    caches: Sequence[Any] | None
    max_tokens: int
    step: int
    decoding: Sequence[int] = ()
    waiting: Sequence[tuple[int, int]] = ()
    preempted: int | None = None


class Row(NamedTuple):
    """A sequence that is being decoded: tokens in its caches, and how many may still come (-1: no bound)."""

    held: int
    left: int


Serves = Literal["server", "script"]  # what a prefix cache stands in for; see `mlx_lm_prefix_cache`


class Preparation(Protocol):
    """What one request waits for before it is served. Called on the generation thread."""

    def step(self) -> bool:
        """Do a small bounded piece of what only this thread may do. True once the request need wait no longer."""

    def cancel(self) -> None:
        """Let go of everything: the request was served, or will not be. May be called again."""


class PrefixCache(Protocol):
    """What stands in for the server's prompt cache. Called on the generation thread.

    Tokens are ints; negative ones name image content. No method raises for a
    reason of its own (a fault is a miss).
    """

    def owns(self, caches: Sequence[Any]) -> bool:
        """Whether every cache is of a class this cache knows. If not, upstream's own prompt cache keeps them."""

    def take(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        """The longest usable stored prefix of `tokens`, shorter than `tokens`, or None. The caller owns the result."""

    def retake(self, source: ModelSource, tokens: Sequence[int]) -> Taken | None:
        """As `take`, for a row that has left the batch and comes back (see `mlx_lm_room`): it is no request's lookup. May be left out."""

    def prepare(self, source: ModelSource, tokens: Sequence[int]) -> Preparation | None:
        """Begin in the background what a `take` of these tokens would stand still for; None when that is nothing.

        The `take` that follows finds what was prepared. Calling `Engine.wake` when it is ready saves the request a wait.
        """

    def put(
        self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "assistant", companion: Companion | None = None
    ) -> None:
        """Store `caches`, which hold `tokens`, and `companion` with them. The caller gives them up."""

    def snapshot(self, source: ModelSource, tokens: Sequence[int], caches: list[Any], *, role: str = "user") -> None:
        """Store a copy-on-write snapshot where a later `put` of a longer sequence could not serve `tokens`. The caller goes on using `caches`.

        With the role ``assistant`` no `put` follows: the caches are the caller's own, as after a reply in ``mlx_lm.chat``.
        """

    def observe(self, caches: list[Any]) -> None:
        """Called after each prefill chunk of a sequential request, to note conversions that bound reuse."""

    def trim(self, *, max_entries: int | None = None, max_bytes: int | None = None) -> None:
        """Evict until at most that many entries and bytes are left."""

    def by_role(self) -> Mapping[str, tuple[int, int]]:
        """(entries, bytes) per role: ``system``, ``user``, ``assistant``."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored entries."""

    def __len__(self) -> int:
        """Number of stored entries."""


class GenerationState(NamedTuple):
    """A generation between two tokens.

    `caches` hold exactly `tokens`: the prompt and what was emitted. `pending` is
    sampled, and neither emitted nor in the caches. Logits processors saw the tokens
    from `context` on. `random` is mlx's random state after `pending` was sampled, as
    two 32-bit numbers; None where generations share one and none can have its own.
    """

    tokens: list[int]
    pending: int
    caches: list[Any]
    context: int = 0
    random: tuple[int, int] | None = None


class RequestCheckpoints(Protocol):
    """The checkpoints of one request. Generation thread only; no method raises for a reason of its own."""

    @property
    def state(self) -> GenerationState | None:
        """Where an interrupted generation of the same request goes on; None to begin anew. The caller owns its caches."""

    def save(self, state: GenerationState) -> None:
        """Have a checkpoint written in the background. The caller goes on using the caches."""

    def end(self, completed: bool) -> None:
        """The request was answered to its end, and its checkpoint is void at once; or it was given up, and the last one stays."""


class CheckpointPreparation(Preparation, Protocol):
    """What a request waits for that may go on from a checkpoint."""

    @property
    def found(self) -> bool:
        """Once `step` gave True: whether there is a checkpoint to go on from. If not, the request's prompt is looked up as any other."""

    @property
    def tokens(self) -> Sequence[int]:
        """Where there is one: its prompt and what was emitted. The request then waits for room for these, not for its prompt alone."""


class GenerationCheckpoints(Protocol):
    """Keeps generations so that they outlive the process. Generation thread only."""

    @property
    def interval(self) -> int:
        """Tokens between two checkpoints of a request."""

    def prepare(self, source: ModelSource, prompt: Sequence[int], policy: str) -> CheckpointPreparation | None:
        """Begin in the background what a `begin` of this request would stand still for; None when that is nothing. The `begin` that follows finds what was prepared."""

    def begin(self, source: ModelSource, prompt: Sequence[int], policy: str) -> RequestCheckpoints | None:
        """A request begins. `policy` is everything but model and prompt that decides what is generated. None to leave it alone."""

    def skipped(self, reason: str) -> None:
        """A request cannot have checkpoints, for a reason in a word."""


class KVScheme(Protocol):
    """How KV is stored, the same for a whole start. Called on the generation thread.

    Caches are lists, one per layer. A sequence's first `start` tokens are run over the
    caches that the model makes; when a cache holds exactly that many, it is converted.
    With a start of 0 caches are made converted.
    """

    start: int

    def name(self, path: Path | None) -> str:
        """The `kv_scheme` of a model's `ModelSource`; ``plain`` where the model's KV stays as it is."""

    def model_loaded(self, model: Any) -> None:
        """A server has loaded a model and will answer with it."""

    def caches(self, model: Any, path: Path | None, caches: list[Any]) -> list[Any]:
        """What a generation begins with, given the empty caches that the model makes."""

    def converts(self, model: Any) -> bool:
        """Whether the caches of a model, for which `caches` was asked, are converted at the start."""

    def plain_class(self, cache: Any) -> type:
        """The class that one request's cache had before it was converted; its own, if the scheme did not convert it."""

    def convert(self, caches: list[Any]) -> None:
        """Convert one request's caches that hold `start` tokens or more, in place. The list keeps its objects."""

    def convert_rows(self, caches: list[Any], rows: Sequence[int]) -> None:
        """Convert rows of a batch's caches, which hold exactly `start` tokens, in the list."""

    def merge(self, rows: Sequence[list[Any]]) -> list[Any] | None:
        """A batch of requests whose caches upstream cannot merge, as they differ in class; None when it can."""

    def extend(self, batch: list[Any], other: list[Any]) -> list[Any]:
        """A batch with the rows of another behind its own. Both are given up."""

    def short(self, caches: list[Any]) -> tuple[int, Refused] | None:
        """Asked before a batch decodes its next tokens: a row for which there is no room, and what to tell its client. None where all rows have it."""

    def attention(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for upstream's quantized attention: the same parameters, and `sinks`. Asked for once."""


class Engine(Protocol):
    """The server's generation loop, as a plugin may see it. Thread-safe."""

    @property
    def busy(self) -> bool:
        """Whether a request is being served, is held back, or rows are decoding."""

    @property
    def decoding(self) -> bool:
        """Whether a request is being served or rows are decoding: what takes processors or memory bandwidth now slows them down."""

    @property
    def alive(self) -> bool:
        """Whether the generation thread runs, so that idle tasks will be called."""

    @property
    def waiting(self) -> int:
        """Requests that came and were not begun yet."""

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop; it waits for the requests that run."""

    @property
    def request(self) -> Served | None:
        """The request that left the queue last: the one that is looked up, when the generation thread asks for a prefix."""

    def wake(self) -> None:
        """Have the idle task called soon, without waiting for the next poll."""


class Request(NamedTuple):
    """An HTTP request for one of a plugin's routes."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    local: bool


class Reply(NamedTuple):
    """A route's answer. `body` is sent as it is; a generator's parts, each as it comes, until it ends, the client goes, or the server stops."""

    status: int
    body: bytes | Generator[bytes, None, None]
    content_type: str = "application/json"
    headers: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Route:
    """One HTTP route: exact path, method, and who may call it.

    `access` is ``local`` (loopback addresses, same origin) or ``all``. The handler
    runs on an HTTP thread and must not touch mlx arrays.
    """

    method: str
    path: str
    handler: Callable[[Request], Reply]
    access: str = "local"


@dataclass(frozen=True)
class SeamReport:
    """The state of one seam. `state` is ``ok``, ``unknown-body``, ``mismatch``, ``missing`` or ``unsupported``."""

    name: str
    state: str
    feature: str
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Host(Protocol):
    """The code that makes mlx-lm call the hooks (entry-point group ``mlx_lm.host``)."""

    def activate(self, plugins: Any, invocation: Invocation) -> None:
        """Hook mlx-lm for these plugins. Raises PluginError when it cannot; then nothing is changed."""

    def deactivate(self) -> None:
        """Undo `activate`."""

    def seams(self) -> list[SeamReport]:
        """The state of every seam against the installed mlx-lm, found without importing mlx."""

    def start_up(self) -> Mapping[str, Any]:
        """The state of the start-up file: ``state`` (``ok``, ``missing``, ``hidden``), ``path``, ``detail``."""

    def launch(self, command: str, argv: Sequence[str]) -> None:
        """Run an upstream command as ``mlx_lm.COMMAND ARGV`` would, with the plugins, without the start-up file."""
