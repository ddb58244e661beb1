"""A month of many machines behind one shared store, simulated: requests, bytes, hit rates and what a store takes for it. No model, no network.

Teams share nothing with each other, so a few teams are simulated whole, request by request, and
multiplied. A prompt is a team's system prompt, one of its contexts (a repository, a manual), and
a conversation of its own; the first two change now and then. Each machine has a local tier with a cap;
behind it is the store, of which the requests are counted as `mlx_lm_tiered.shared` makes them: lengths of rungs, bytes of
pieces and the search among rungs are its own. `on_paper` is the same by formulas, without anybody simulated.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..schemes.spec import parse
from ..shared.lookup import WAYS
from ..shared.manifest import PIECE
from ..shared.names import LENGTHS
from ..shared.rates import PAYS, patience

DAYS = 30
WORKING = tuple(day for day in range(DAYS) if day % 7 < 5)
DAY = 86_400.0
# What a gigabyte is where storage is sold.
GB = 1e9


@dataclass(frozen=True)
class Trace:
    """What one kind of use asks for. Tokens, days, and of each machine and working day the sessions."""

    name: str
    machines: int = 1000
    teams: int = 50
    sessions: int = 16
    turns: int = 10
    turn_tokens: int = 1500  # question and answer
    system_tokens: int = 8000
    system_days: float = 15.0  # until it is another one
    contexts: int = 5
    context_tokens: int = 20_000
    context_days: float = 1.0
    turn_minutes: float = 3.0

    @property
    def members(self) -> int:
        """Machines of a team."""
        return self.machines // self.teams

    @property
    def prefix(self) -> int:
        """Tokens that a session's first prompt shares with others'."""
        return self.system_tokens + self.context_tokens


TRACES = (
    # Agents with long system prompts and tools, and a repository's files in front of the task; these change every day.
    Trace("agents"),
    # Chats: one system prompt, no context, short turns.
    Trace("chat", sessions=12, turns=6, turn_tokens=500, system_tokens=2500, system_days=30.0, contexts=1, context_tokens=0, turn_minutes=2.0),
    # Long documents that many ask about, one question each.
    Trace("documents", sessions=30, turns=1, turn_tokens=600, system_tokens=500, system_days=30.0, contexts=40, context_tokens=30_000, context_days=10.0, turn_minutes=1.0),
)


@dataclass(frozen=True)
class Machine:
    """What each machine is, and the settings of its tiers."""

    token_bytes: int
    local_bytes: float = 100e9  # --ssd-cache-max
    store_bytes: float = 100e9  # --shared-cache-max, of a team
    ttl_days: float = 30.0  # --shared-cache-ttl
    network: float = 120e6  # bytes a second from the store: a gigabit
    prefill: float = 400.0  # tokens a second
    writes: float = 1.0  # share of the machines with --shared-cache-write on; the others only read

    def fetches(self, tokens: int) -> bool:
        """Whether so many tokens are fetched: it is expected to pay, and a request waits so long (`shared.rates`)."""
        computing, coming = tokens / self.prefill, tokens * self.token_bytes / self.network
        return coming < PAYS * computing and coming <= patience(computing)


@dataclass(frozen=True)
class Price:
    """Dollars. `write` for a thousand PUT or LIST, `read` for a thousand GET or HEAD, `stored` for a gigabyte and month, `out` for one that leaves the store, `flat` a month."""

    name: str
    write: float
    read: float
    stored: float
    out: float
    flat: float = 0.0


# As the providers listed them when this was written; see docs/shared-tier-costs.md. Check them before you count on them.
PRICES = (
    Price("Amazon S3 Standard, same region", 0.005, 0.0004, 0.023, 0.0),
    Price("Amazon S3 Standard, over the internet", 0.005, 0.0004, 0.023, 0.09),
    Price("Cloudflare R2", 0.0045, 0.00036, 0.015, 0.0),
    Price("a machine of your own with 16 TB (nginx)", 0.0, 0.0, 0.0, 0.0, flat=100.0),
)


def token_bytes(scheme: str, layers: int = 32, heads: int = 8, dim: int = 128) -> int:
    """Bytes of a token's keys and values, of an 8B Llama's shape unless told otherwise, under a KV scheme."""
    width, form = heads * dim, parse(scheme).form
    return layers * (2 * width * 2 if form is None else form.nbytes(width, width, 2))


def pieces_of(nbytes: float) -> int:
    """Pieces that a segment of so many bytes is cut into."""
    return math.ceil(nbytes / PIECE)


def rungs_between(above: int, most: int) -> list[int]:
    """Lengths of rungs, those longer than `above` and of `most` tokens at most."""
    return [length for length in LENGTHS if above < length <= most]


def asked(rungs: Sequence[int], there: int) -> tuple[int, int]:
    """GETs of the search among rungs of which those up to `there` tokens exist (`shared.lookup.Lookup.reach`), and the length that it reaches; 0 for none."""
    if not rungs:
        return 0, 0
    if rungs[0] > there:
        return 1, 0
    gets, low, high = 1, 0, len(rungs)
    while high - low > 1:
        ask = sorted({low + (high - low) * way // WAYS for way in range(1, WAYS)} - {low})
        gets += len(ask)
        for at in ask:
            if rungs[at] <= there:
                low = at
            else:
                high = at
                break
    return gets, rungs[low]


@dataclass(frozen=True)
class Segment:
    """Tokens behind others, by the name of all of them."""

    name: tuple[Any, ...]
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass
class Kept:
    """A segment in the store."""

    nbytes: float
    used: float
    objects: int  # its pieces, rungs, and the manifest that ends with it


@dataclass
class Local:
    """A machine's own tiers: segments, those used last at the end."""

    cap: float
    held: OrderedDict[tuple[Any, ...], float] = field(default_factory=OrderedDict)
    nbytes: float = 0.0
    known: set[tuple[Any, ...]] = field(default_factory=set)  # segments that it has seen in the store
    uses: dict[tuple[Any, ...], int] = field(default_factory=dict)  # entries, and the day when it noted their use

    def common(self, chain: Sequence[Segment]) -> int:
        """Tokens of a chain that are here."""
        end = 0
        for segment in chain:
            if segment.name not in self.held:
                break
            self.held.move_to_end(segment.name)
            end = segment.end
        return end

    def keep(self, chain: Sequence[Segment], token_bytes: int) -> None:
        # The longest last: what others continue is let go after them.
        for segment in reversed(chain):
            if segment.name in self.held:
                self.held.move_to_end(segment.name)
            else:
                self.held[segment.name] = segment.tokens * token_bytes
                self.nbytes += segment.tokens * token_bytes
        while self.nbytes > self.cap and self.held:
            self.nbytes -= self.held.popitem(last=False)[1]


class Team:
    """One team's machines and its part of the store, for a month."""

    def __init__(self, trace: Trace, machine: Machine, seed: int):
        self._trace, self._machine = trace, machine
        self._random = random.Random(seed)
        self._locals = [Local(machine.local_bytes) for _ in range(trace.members)]
        self._writers = round(trace.members * machine.writes)
        self._store: dict[tuple[Any, ...], Kept] = {}
        self._noted: dict[tuple[Any, ...], float] = {}  # entries, and when their use was noted last
        self._stored = 0.0
        self.counts: Counter[str] = Counter()
        self.mean_stored = 0.0

    def run(self) -> None:
        events = sorted(self._events())
        at = 0
        for day in range(DAYS):
            while at < len(events) and events[at][0] < (day + 1) * DAY:
                self._turn(*events[at])
                at += 1
            self.mean_stored += self._stored / DAYS
            self._clean((day + 1) * DAY)

    def _events(self) -> Iterator[tuple[float, int, int, int, int]]:
        """When, which machine, session and turn, over which context."""
        trace, session = self._trace, 0
        for day in WORKING:
            for machine in range(trace.members):
                for _ in range(trace.sessions):
                    session += 1
                    began = (day + 0.35 + 0.4 * self._random.random()) * DAY
                    context = self._random.randrange(trace.contexts)
                    for turn in range(trace.turns):
                        yield began + turn * trace.turn_minutes * 60, machine, session, turn, context

    def _turn(self, now: float, number: int, session: int, turn: int, context: int) -> None:
        trace, machine, local = self._trace, self._machine, self._locals[number]
        version = int(now / DAY / trace.system_days), int(now / DAY / trace.context_days)
        chain = [Segment(("system", version[0]), 0, trace.system_tokens)]
        if trace.context_tokens:
            chain.append(Segment(("context", context, *version), trace.system_tokens, trace.context_tokens))
        chain += [Segment(("turn", session, i), trace.prefix + i * trace.turn_tokens, trace.turn_tokens) for i in range(turn)]
        prompt = trace.prefix + turn * trace.turn_tokens + trace.turn_tokens // 2
        counts = self.counts
        counts["prompt_tokens"] += prompt
        have = local.common(chain)
        counts["local_tokens"] += have
        have = self._fetch(now, local, chain, have, prompt)
        counts["computed_tokens"] += prompt - have
        chain.append(Segment(("turn", session, turn), trace.prefix + turn * trace.turn_tokens, trace.turn_tokens))
        local.keep(chain, machine.token_bytes)
        if number < self._writers:
            self._push(now, local, chain)

    def _fetch(self, now: float, local: Local, chain: Sequence[Segment], have: int, prompt: int) -> int:
        """Look a prompt up in the store, and take what is there; how many tokens it has then."""
        counts = self.counts
        there = 0
        shared: list[Segment] = []
        for segment in chain:
            if segment.name not in self._store:
                break
            there, shared = segment.end, [*shared, segment]
        gets, reached = asked(rungs_between(have, prompt - 1), there)
        counts["lookups"] += gets > 0
        counts["get"] += gets
        if not reached or not self._machine.fetches(there - have):
            return have
        missing = [segment for segment in shared if segment.end > have]
        counts["get"] += 1 + sum(pieces_of(segment.tokens * self._machine.token_bytes) for segment in missing)
        counts["read_bytes"] += (there - have) * self._machine.token_bytes
        counts["fetches"] += 1
        counts["shared_tokens"] += there - have
        for segment in shared:
            self._store[segment.name].used = now
        entry, day = shared[-1].name, int(now / DAY)
        if local.uses.get(entry) != day:
            local.uses[entry] = day
            counts["head"] += 1
            if now - self._noted.get(entry, -DAY) >= DAY:
                self._noted[entry] = now
                counts["put"] += 1
        return there

    def _push(self, now: float, local: Local, chain: Sequence[Segment]) -> None:
        """Upload the entry of a whole chain."""
        counts = self.counts
        there = 0
        for segment in chain:
            if segment.name not in self._store:
                break
            there = segment.end
        counts["head"] += 1  # its manifest
        for segment in chain:
            kept, nbytes = self._store.get(segment.name), segment.tokens * self._machine.token_bytes
            if segment.name not in local.known:
                local.known.add(segment.name)
                counts["head"] += pieces_of(nbytes)
                if kept is None:
                    counts["put"] += pieces_of(nbytes)
                    counts["written_bytes"] += nbytes
            if kept is None:
                objects = pieces_of(nbytes) + len(rungs_between(segment.start, segment.end)) + (segment is chain[-1])
                kept = self._store[segment.name] = Kept(nbytes, now, objects)
                self._stored += nbytes
            kept.used = now
        end = chain[-1].end
        gets, reached = asked(rungs_between(0, end), there)
        counts["get"] += gets
        counts["head"] += reached > 0  # whether the entry that the rung names is there
        counts["put"] += 1 + len(rungs_between(reached, end))

    def _clean(self, now: float) -> None:
        """Once a day, by one machine: all is listed, every manifest read, and what is old or too much goes."""
        counts = self.counts
        objects = sum(kept.objects for kept in self._store.values())
        counts["put"] += 1
        counts["list"] += 4 + objects // 1000
        counts["get"] += sum(name[0] == "turn" for name in self._store)
        for name, kept in sorted(self._store.items(), key=lambda item: item[1].used):
            if self._stored <= self._machine.store_bytes and kept.used >= now - self._machine.ttl_days * DAY:
                break
            counts["delete"] += kept.objects
            self._stored -= kept.nbytes
            del self._store[name]


def simulate(trace: Trace, machine: Machine, sample: int = 2, seed: int = 0) -> dict[str, float]:
    """A month of all teams, from `sample` of them. Requests by kind, bytes, tokens, and `stored_bytes`, the mean at the end of a day."""
    teams = [Team(trace, machine, seed + number) for number in range(min(sample, trace.teams))]
    for team in teams:
        team.run()
    scale = trace.teams / len(teams)
    names = ("get", "head", "put", "list", "delete", "read_bytes", "written_bytes", "fetches", "prompt_tokens", "local_tokens", "shared_tokens", "computed_tokens")
    return _figures({name: sum(team.counts[name] for team in teams) * scale for name in names}, sum(team.mean_stored for team in teams) * scale, machine)


def on_paper(trace: Trace, machine: Machine) -> dict[str, float]:
    """The same by formulas (docs/shared-tier-costs.md), where all machines write and local tiers are large enough for what a machine uses until it changes."""
    b, members, days = machine.token_bytes, trace.members, len(WORKING)
    sessions = members * days * trace.sessions
    turns = sessions * trace.turns
    ends = [trace.prefix + (turn + 1) * trace.turn_tokens for turn in range(trace.turns)]
    prompts = [trace.prefix + turn * trace.turn_tokens + trace.turn_tokens // 2 for turn in range(trace.turns)]
    # A machine meets a version of a context if one of its sessions while that lasts is about it.
    versions = DAYS / trace.system_days
    lasts = max(1.0, trace.context_days * days / DAYS)
    periods = days / lasts if trace.context_tokens else 0.0
    meets = 1 - (1 - 1 / trace.contexts) ** (trace.sessions * lasts)
    # The first one of a team computes it.
    first = 1 - (1 - meets) ** members
    contexts = periods * trace.contexts * (members * meets - first)
    systems = versions * (members - 1)
    pays = machine.fetches(trace.context_tokens or trace.system_tokens)
    read = (contexts * trace.context_tokens + systems * trace.system_tokens) * b if pays else 0.0
    pieces = contexts * pieces_of(trace.context_tokens * b) + systems * pieces_of(trace.system_tokens * b)
    fetches = (contexts if trace.context_tokens else systems) if pays else 0.0
    own = pieces_of(trace.turn_tokens * b)
    new_pieces = turns * own + versions * pieces_of(trace.system_tokens * b) + periods * trace.contexts * first * pieces_of(trace.context_tokens * b)
    rungs = len(rungs_between(trace.prefix, ends[-1]))
    # Looked up is a turn in whose new tokens a rung lies, and a prefix that is not there.
    starts = [trace.prefix, *ends[:-1]]
    lookups = sessions * sum(bool(rungs_between(start, prompt - 1)) for start, prompt in zip(starts, prompts, strict=True))
    found = asked(rungs_between(trace.system_tokens if trace.context_tokens else 0, prompts[0] - 1), trace.prefix)[0]
    searches = sum(asked(rungs_between(0, end), start)[0] for start, end in zip(starts, ends, strict=True)) * sessions
    entries_a_day = turns / days
    kept = min(machine.store_bytes / (trace.turn_tokens * b), turns / 2) if machine.store_bytes else turns / 2
    counts = {
        "get": lookups + fetches * (found + 1) + (pieces if pays else 0.0) + searches + days * entries_a_day + DAYS * kept,
        "head": turns * 2 + new_pieces + pieces + fetches,
        "put": new_pieces + turns + sessions * rungs + DAYS,
        "list": DAYS * (4 + (kept + entries_a_day * days / DAYS) * (own + 1) / 1000),
        "read_bytes": read,
        "written_bytes": turns * trace.turn_tokens * b + (versions * trace.system_tokens + periods * trace.contexts * first * trace.context_tokens) * b,
        "prompt_tokens": sum(prompts) * sessions,
        "shared_tokens": read / b,
        "fetches": fetches,
    }
    computed = sessions * sum(prompt - start for prompt, start in zip(prompts, starts, strict=True))
    computed += (periods * trace.contexts * (members * meets) * trace.context_tokens + versions * members * trace.system_tokens) - counts["shared_tokens"]
    counts["computed_tokens"] = computed
    counts["local_tokens"] = counts["prompt_tokens"] - computed - counts["shared_tokens"]
    growing = days / DAYS * entries_a_day * trace.turn_tokens * b
    stored = min(machine.store_bytes + growing, growing * DAYS / 2) if machine.store_bytes else growing * DAYS / 2
    return _figures({name: count * trace.teams for name, count in counts.items()}, stored * trace.teams, machine)


def _figures(counts: dict[str, float], stored: float, machine: Machine) -> dict[str, float]:
    prompt = counts["prompt_tokens"]
    names = ("get", "head", "put", "list", "delete", "read_bytes", "written_bytes", "fetches")
    return {
        **{name: counts[name] for name in names if name in counts}, "stored_bytes": stored,
        "local_hit_rate": counts["local_tokens"] / prompt, "shared_hit_rate": counts.get("shared_tokens", 0.0) / prompt,
        "prefill_hours_saved": counts.get("shared_tokens", 0.0) / machine.prefill / 3600, "prefill_hours_left": counts["computed_tokens"] / machine.prefill / 3600,
    }  # fmt: skip


def cost(figures: dict[str, float], price: Price) -> float:
    """Dollars of a month."""
    writes, reads = figures["put"] + figures["list"], figures["get"] + figures["head"]
    return writes / 1000 * price.write + reads / 1000 * price.read + figures["stored_bytes"] / GB * price.stored + figures["read_bytes"] / GB * price.out + price.flat


def run(machines: int = 1000, scheme: str = "affine:4", writers: float = 1.0, sample: int = 2, seed: int = 0) -> dict[str, Any]:
    """`rows`: for each trace the figures, simulated and on paper, and what each store takes for a month."""
    machine = Machine(token_bytes(scheme), writes=writers)
    rows = []
    for trace in TRACES:
        trace = replace(trace, machines=machines, teams=max(1, round(trace.teams * machines / trace.machines)))
        figures = simulate(trace, machine, sample, seed)
        rows.append({"trace": trace.name, **figures, "paper": on_paper(trace, machine) if writers == 1 else None, "dollars": {price.name: cost(figures, price) for price in PRICES}})
    return {"bench": "fleet", "machines": machines, "scheme": scheme, "token_bytes": machine.token_bytes, "writers": writers, "teams_simulated": sample, "rows": rows}
