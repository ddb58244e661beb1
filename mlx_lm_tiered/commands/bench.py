"""``mlx_lm.tiered bench``: measurements against real server processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import endurance, fleet, sampling, shared, speculative
from .terminal import count, directory, end_in_order, model, say, writable


def add_parsers(bench: argparse.ArgumentParser) -> None:
    """The measurements, each with its flags."""
    benches = bench.add_subparsers(metavar="BENCH", required=True)
    restart = benches.add_parser("restart", help="time to first token: cold, from RAM, after a restart")
    count(restart, "--prefix-tokens", 4096, "length of the prompt")
    count(restart, "--repeats", 3, "prompts, each measured three times", "R")
    restart.add_argument("--ssd-cache", type=Path, metavar="DIR", help="directory of the SSD tier (default: a temporary one)")
    restart.add_argument("--ssd-restore", choices=("always", "auto"), default="always", help="the server's flag of this name (default: always)")
    restart.set_defaults(run=run_bench_restart)
    overhead = benches.add_parser("overhead", help="decode speed with the tier on over decode speed with it off")
    count(overhead, "--prefix-tokens", 512, "length of the prompt whose cache waits to be written")
    count(overhead, "--decode-tokens", 96, "tokens decoded in each measurement")
    count(overhead, "--repeats", 8, "pairs of measurements", "R")
    overhead.add_argument("--full-queue", action="store_true", help="have the waiting cache written while tokens are decoded, as when the queue is over its cap")
    overhead.set_defaults(run=run_bench_overhead)
    writes = benches.add_parser("writes", help="bytes that a growing conversation writes, per byte of its new tokens' KV")
    count(writes, "--turns", 20, "turns of the conversation, each flushed")
    count(writes, "--turn-tokens", 200, "tokens of a user's turn")
    writes.set_defaults(run=run_bench_writes)
    stall = benches.add_parser("stall", help="time between tokens of two streams while a third request is restored, over the time without")
    count(stall, "--prefix-tokens", 4096, "length of what is restored")
    count(stall, "--repeats", 5, "pairs of measurements", "R")
    stall.set_defaults(run=run_bench_stall)
    index = benches.add_parser("index", help="finding one of many entries, reading all headers at start, and readiness with and without them")
    count(index, "--entries", 10_000, "entries in the directory")
    count(index, "--tokens", 16_000, "tokens of each")
    count(index, "--repeats", 5, "pairs of server starts", "R")
    index.add_argument("--directory", type=Path, metavar="DIR", help="make the files in a temporary directory under DIR")
    index.set_defaults(run=run_bench_index)
    checkpoint = benches.add_parser("checkpoint", help="decode speed with checkpoints over that without, and going on after a kill against beginning anew")
    count(checkpoint, "--prefix-tokens", 512, "length of the prompt")
    count(checkpoint, "--decode-tokens", 600, "tokens decoded in each measurement")
    count(checkpoint, "--interval", 256, "tokens between two checkpoints")
    count(checkpoint, "--repeats", 5, "pairs of measurements", "R")
    checkpoint.set_defaults(run=run_bench_checkpoint)
    schemes = benches.add_parser("schemes", help="bytes, peak memory, speed and logits of KV schemes, side by side")
    schemes.add_argument("--schemes", default="bf16,affine:8,affine:4", metavar="LIST", help="schemes, by commas (default: bf16,affine:8,affine:4)")
    count(schemes, "--tokens", 4096, "tokens of the context")
    count(schemes, "--decode-tokens", 16, "tokens decoded in each measurement")
    count(schemes, "--repeats", 5, "rounds, each with every scheme", "R")
    schemes.set_defaults(run=run_bench_schemes)
    needle = benches.add_parser("needle", help="numbers hidden in a long text and asked for at its end, under KV schemes")
    needle.add_argument("--schemes", default="bf16,turbo,affine:4", metavar="LIST", help="schemes, by commas (default: bf16,turbo,affine:4)")
    count(needle, "--tokens", 1024, "tokens of a text")
    count(needle, "--cases", 4, "texts, the number deeper in each")
    needle.set_defaults(run=run_bench_needle)
    turbo = benches.add_parser("turboquant", help="TurboQuant beside other KV schemes: logits, bytes of a token, tokens in the same bytes, attention")
    turbo.add_argument("--schemes", metavar="LIST", help="schemes, by commas (default: bf16, affine in 8 and 4 bits, and turbo in several widths)")
    count(turbo, "--text-tokens", 512, "tokens of the text, of which the logits of the last half are compared")
    count(turbo, "--context", 16384, "tokens in bf16, whose bytes caches of the schemes fill")
    turbo.set_defaults(run=run_bench_turboquant)
    paged = benches.add_parser("paged", help="paged KV beside plain caches: decode steps, bytes of requests of mixed lengths, a shared system prompt")
    count(paged, "--context", 4096, "tokens before the decode steps of one row")
    count(paged, "--longest", 8192, "tokens of the longest of 8 requests")
    count(paged, "--shared", 8192, "tokens of the system prompt of 16 requests")
    count(paged, "--own", 64, "each one's own tokens")
    count(paged, "--decode-tokens", 64, "tokens of each reply")
    count(paged, "--block", 64, "tokens of a block")
    count(paged, "--repeats", 5, "pairs of measurements", "R")
    paged.add_argument("--model", metavar="DIR", help="directory or hub name of a model")
    paged.add_argument("--random", metavar="CONTEXTS", help="decode steps only, of an 8B Llama's shape with random weights, after so many tokens each, by commas; and of 8 rows of 64 to --longest")
    paged.add_argument("--kv-scheme", default="bf16", metavar="SCHEME", help="both under a KV scheme, from the first token on")
    count(paged, "--layers", 32, "layers of that model")
    count(paged, "--hidden", 4096, "its hidden size")
    paged.add_argument("--exact", action="store_true", help="compare logits with those without paging instead, in blocks of 1, 16 and 256 tokens")
    paged.set_defaults(run=run_bench_paged)
    peak = benches.add_parser("peak", help="peak memory of a long prefill under KV schemes, against that in full precision")
    count(peak, "--tokens", 32768, "tokens of the prompt")
    peak.add_argument("--schemes", metavar="LIST", help="schemes, by commas (default: affine:8, affine:4, and affine:4 from the middle on)")
    count(peak, "--heads", 4, "query heads of 64, two to a KV head")
    peak.set_defaults(run=run_bench_peak)
    concurrent = benches.add_parser("concurrent", help="requests at once under a KV scheme, against one after another under mlx-lm's --kv-bits")
    concurrent.add_argument("--scheme", default="affine:4", metavar="SCHEME", help="affine:BITS[:GROUP][@START] (default: affine:4)")
    count(concurrent, "--requests", 4, "requests at once")
    count(concurrent, "--prefix-tokens", 256, "length of each prompt")
    count(concurrent, "--decode-tokens", 96, "tokens of each answer")
    count(concurrent, "--repeats", 3, "pairs of measurements", "R")
    concurrent.set_defaults(run=run_bench_concurrent)
    guard = benches.add_parser("guard", help="decode speed with the memory guard over that without")
    count(guard, "--decode-tokens", 600, "tokens decoded in each measurement")
    count(guard, "--repeats", 8, "pairs of measurements", "R")
    guard.set_defaults(run=run_bench_guard)
    polling = benches.add_parser("polling", help="decode speed while the status page is open and the metrics are scraped, over that while nobody looks")
    count(polling, "--seconds", 5, "seconds of each measurement")
    count(polling, "--repeats", 12, "pairs of measurements", "R")
    polling.set_defaults(run=run_bench_polling)
    for parser in (restart, overhead, writes, stall, index, checkpoint, schemes, needle, turbo, concurrent, guard, polling):
        parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    restoring = benches.add_parser("restore", help="speed of a restore over that of a raw read of the same files, warm and cold")
    count(restoring, "--tokens", 6000, "tokens of the entry, each 131 kB")
    count(restoring, "--segments", 8, "files of the chain")
    count(restoring, "--repeats", 12, "rounds, each with every way to read", "R")
    restoring.add_argument("--directory", type=Path, metavar="DIR", help="make the files in a temporary directory under DIR")
    restoring.set_defaults(run=run_bench_restore)
    endurance.add_parsers(benches)
    speculative.add_parser(benches)
    speculative.add_streams_parser(benches)
    sampling.add_parser(benches)
    shared.add_parser(benches)
    fleet.add_parser(benches)
    start_up = benches.add_parser("start-up", help="what the start-up file costs an unrelated script")
    count(start_up, "--repeats", 40, "starts with and without it", "R")
    start_up.set_defaults(run=run_bench_start_up)
    kernels = benches.add_parser("kernels", help="decode attention on a GPU: self-test, microseconds a step, steps of a whole model")
    kernels.add_argument("parts", nargs="*", metavar="PART", help="of self-test, steps, sweep, model, blocks, blocks-sweep (default: self-test, steps, model)")
    kernels.add_argument("--sweep", action="store_true", help="also measure every way to cut up the work")
    kernels.set_defaults(run=run_bench_kernels)
    for parser in (restart, overhead, writes, stall, index, checkpoint, schemes, needle, turbo, paged, concurrent, guard, polling, restoring, start_up, kernels, peak):
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def run_bench_restart(args: argparse.Namespace) -> int:
    from ..bench import restart

    return run_measurement(
        args,
        lambda: restart.run(
            Path(model(args.model)), args.prefix_tokens, args.repeats,
            directory=directory(args.ssd_cache, environment=False), flags=["--ssd-restore", args.ssd_restore],
        ),
        differing,
    )


def run_bench_overhead(args: argparse.Namespace) -> int:
    from ..bench import overhead

    return run_measurement(
        args,
        lambda: overhead.run(Path(model(args.model)), args.prefix_tokens, args.decode_tokens, args.repeats, args.full_queue),
        differing,
    )


def run_bench_writes(args: argparse.Namespace) -> int:
    from ..bench import writes

    return run_measurement(
        args,
        lambda: writes.run(Path(model(args.model)), args.turns, args.turn_tokens),
        lambda result: [] if result["ram_and_restart_equal"] else ["the answers differ"],
    )


def run_bench_index(args: argparse.Namespace) -> int:
    from ..bench import index

    return run_measurement(
        args,
        lambda: index.run(Path(model(args.model)), args.entries, args.tokens, args.repeats, directory=args.directory),
    )


def run_bench_restore(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import restore

    return run_measurement(
        args, lambda: restore.run(args.tokens, segments=args.segments, repeats=args.repeats, directory=args.directory)
    )


def run_bench_stall(args: argparse.Namespace) -> int:
    from ..bench import stall

    return run_measurement(
        args,
        lambda: stall.run(Path(model(args.model)), args.prefix_tokens, args.repeats),
        differing,
    )


def run_bench_guard(args: argparse.Namespace) -> int:
    from ..bench import guard

    return run_measurement(
        args,
        lambda: guard.run(Path(model(args.model)), args.decode_tokens, args.repeats),
        differing,
    )


def run_bench_polling(args: argparse.Namespace) -> int:
    from ..bench import polling

    return run_measurement(args, lambda: polling.run(Path(model(args.model)), args.seconds, args.repeats))


def run_bench_checkpoint(args: argparse.Namespace) -> int:
    from ..bench import checkpoint

    return run_measurement(
        args,
        lambda: checkpoint.run(Path(model(args.model)), args.prefix_tokens, args.decode_tokens, args.interval, args.repeats),
        differing,
    )


def run_bench_schemes(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import schemes

    path = Path(model(args.model))
    return run_rows(args, lambda: schemes.run(path, args.schemes.split(","), args.tokens, args.decode_tokens, args.repeats))


def run_bench_needle(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import needle

    path = Path(model(args.model))
    return run_rows(args, lambda: needle.run(path, args.schemes.split(","), args.tokens, args.cases))


def run_bench_turboquant(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import turboquant

    path = Path(model(args.model))
    schemes = args.schemes.split(",") if args.schemes else turboquant.SCHEMES
    return run_rows(args, lambda: turboquant.run(path, schemes, args.text_tokens, args.context))


def run_bench_paged(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import paged

    if args.random:
        try:
            contexts = [int(number) for number in args.random.split(",")]
        except ValueError:
            return say(f"--random {args.random} is not a list of numbers", 2)
        return run_rows(args, lambda: paged.steps(contexts, args.layers, args.hidden, args.block, args.repeats, args.kv_scheme, args.longest))
    if args.model is None:
        return say("add --model DIR, or --random CONTEXTS", 2)
    path = Path(model(args.model))
    if args.exact:
        from ..bench import exact

        return run_rows(args, lambda: exact.run(path, scheme=args.kv_scheme), exact.found)
    return run_rows(args, lambda: paged.run(path, args.context, args.longest, args.shared, args.own, args.decode_tokens, args.block, args.repeats, scheme=args.kv_scheme))


def run_bench_peak(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import peak

    return run_rows(
        args,
        lambda: peak.run(args.tokens, args.schemes and args.schemes.split(","), heads=args.heads),
        lambda result: ["a scheme's peak is above that of full precision"] if result["peak_ratio_max"] > 1 else [],
    )


def run_rows(
    args: argparse.Namespace, measure: Callable[[], dict[str, Any]], faults: Callable[[dict[str, Any]], list[str]] = lambda result: []
) -> int:
    """A measurement with a table; 2 for a scheme that cannot be."""
    from ..bench import report

    result: dict[str, Any] = {}

    def measured() -> dict[str, Any]:
        result.update(measure())
        return result

    try:
        code = run_measurement(args, measured, faults)
    except ValueError as error:
        return say(str(error), 2)
    for rows in ("rows", "attention"):
        if rows in result:
            print(report.table(result[rows]))
    return code


def run_bench_concurrent(args: argparse.Namespace) -> int:
    from ..bench import concurrent

    try:
        return run_measurement(
            args,
            lambda: concurrent.run(Path(model(args.model)), args.scheme, args.requests, args.prefix_tokens, args.decode_tokens, args.repeats),
        )
    except ValueError as error:
        return say(str(error), 2)


def run_bench_kernels(args: argparse.Namespace) -> int:
    from ..bench import kernels, report
    from ..kernels.choice import available

    if not available():
        return say("decode kernels need a GPU that mlx reaches by CUDA or Metal", 2)
    parts = [*(args.parts or ["self-test", "steps", "model"]), *(["sweep"] if args.sweep else [])]
    unknown = sorted(set(parts) - set(kernels.PARTS))
    if unknown:
        return say(f"no part {unknown[0]}: there are {', '.join(kernels.PARTS)}", 2)
    result: dict[str, Any] = {"bench": "kernels"}
    for part in dict.fromkeys(parts):
        result[part] = kernels.part(part)
    report.write(result, args.json)
    return int(any(not row["ok"] for part in ("self-test", "blocks") for row in result.get(part, ())))


def run_bench_start_up(args: argparse.Namespace) -> int:
    from ..bench import startup

    return run_measurement(args, lambda: startup.run(args.repeats))


def differing(result: dict[str, Any]) -> list[str]:
    """The fault of a measurement in which the same request got different answers."""
    return [] if result["text_equal"] else ["the answers differ"]


def run_measurement(
    args: argparse.Namespace, measure: Callable[[], dict[str, Any]], faults: Callable[[dict[str, Any]], list[str]] = lambda result: []
) -> int:
    """Measure, write and show it; 1 when that failed or `faults` finds some in the result."""
    from ..bench import report
    from ..bench.client import RequestFailed
    from ..bench.server import ServerFailed

    writable(args.json)
    end_in_order()
    try:
        result = measure()
    except (RequestFailed, ServerFailed, OSError) as error:
        return say(str(error), 1)
    report.write(result, args.json)
    print(report.lines(result))
    found = faults(result)
    return say("; ".join(found), 1) if found else 0
