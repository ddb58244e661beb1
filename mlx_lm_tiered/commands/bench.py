"""``mlx_lm.tiered bench``: measurements against real server processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import endurance
from .terminal import directory, end_in_order, model, positive, say, writable


def add_parsers(bench: argparse.ArgumentParser) -> None:
    """The measurements, each with its flags."""
    benches = bench.add_subparsers(metavar="BENCH", required=True)
    restart = benches.add_parser("restart", help="time to first token: cold, from RAM, after a restart")
    restart.add_argument("--prefix-tokens", type=positive, default=4096, metavar="N", help="length of the prompt (default: 4096)")
    restart.add_argument("--repeats", type=positive, default=3, metavar="R", help="prompts, each measured three times (default: 3)")
    restart.add_argument("--ssd-cache", type=Path, metavar="DIR", help="directory of the SSD tier (default: a temporary one)")
    restart.add_argument("--ssd-restore", choices=("always", "auto"), default="always", help="the server's flag of this name (default: always)")
    restart.set_defaults(run=run_bench_restart)
    overhead = benches.add_parser("overhead", help="decode speed with the tier on over decode speed with it off")
    overhead.add_argument("--prefix-tokens", type=positive, default=512, metavar="N", help="length of the prompt whose cache waits to be written (default: 512)")
    overhead.add_argument("--decode-tokens", type=positive, default=96, metavar="N", help="tokens decoded in each measurement (default: 96)")
    overhead.add_argument("--repeats", type=positive, default=8, metavar="R", help="pairs of measurements (default: 8)")
    overhead.add_argument("--full-queue", action="store_true", help="have the waiting cache written while tokens are decoded, as when the queue is over its cap")
    overhead.set_defaults(run=run_bench_overhead)
    writes = benches.add_parser("writes", help="bytes that a growing conversation writes, per byte of its new tokens' KV")
    writes.add_argument("--turns", type=positive, default=20, metavar="N", help="turns of the conversation, each flushed (default: 20)")
    writes.add_argument("--turn-tokens", type=positive, default=200, metavar="N", help="tokens of a user's turn (default: 200)")
    writes.set_defaults(run=run_bench_writes)
    stall = benches.add_parser("stall", help="time between tokens of two streams while a third request is restored, over the time without")
    stall.add_argument("--prefix-tokens", type=positive, default=4096, metavar="N", help="length of what is restored (default: 4096)")
    stall.add_argument("--repeats", type=positive, default=5, metavar="R", help="pairs of measurements (default: 5)")
    stall.set_defaults(run=run_bench_stall)
    index = benches.add_parser("index", help="finding one of many entries, reading all headers at start, and readiness with and without them")
    index.add_argument("--entries", type=positive, default=10_000, metavar="N", help="entries in the directory (default: 10000)")
    index.add_argument("--tokens", type=positive, default=16_000, metavar="N", help="tokens of each (default: 16000)")
    index.add_argument("--repeats", type=positive, default=5, metavar="R", help="pairs of server starts (default: 5)")
    index.add_argument("--directory", type=Path, metavar="DIR", help="make the files in a temporary directory under DIR")
    index.set_defaults(run=run_bench_index)
    checkpoint = benches.add_parser("checkpoint", help="decode speed with checkpoints over that without, and going on after a kill against beginning anew")
    checkpoint.add_argument("--prefix-tokens", type=positive, default=512, metavar="N", help="length of the prompt (default: 512)")
    checkpoint.add_argument("--decode-tokens", type=positive, default=600, metavar="N", help="tokens decoded in each measurement (default: 600)")
    checkpoint.add_argument("--interval", type=positive, default=256, metavar="N", help="tokens between two checkpoints (default: 256)")
    checkpoint.add_argument("--repeats", type=positive, default=5, metavar="R", help="pairs of measurements (default: 5)")
    checkpoint.set_defaults(run=run_bench_checkpoint)
    schemes = benches.add_parser("schemes", help="bytes, peak memory, speed and logits of KV schemes, side by side")
    schemes.add_argument("--schemes", default="bf16,affine:8,affine:4", metavar="LIST", help="schemes, by commas (default: bf16,affine:8,affine:4)")
    schemes.add_argument("--tokens", type=positive, default=4096, metavar="N", help="tokens of the context (default: 4096)")
    schemes.add_argument("--decode-tokens", type=positive, default=16, metavar="N", help="tokens decoded in each measurement (default: 16)")
    schemes.add_argument("--repeats", type=positive, default=5, metavar="R", help="rounds, each with every scheme (default: 5)")
    schemes.set_defaults(run=run_bench_schemes)
    peak = benches.add_parser("peak", help="peak memory of a long prefill under KV schemes, against that in full precision")
    peak.add_argument("--tokens", type=positive, default=32768, metavar="N", help="tokens of the prompt (default: 32768)")
    peak.add_argument("--schemes", metavar="LIST", help="schemes, by commas (default: affine:8, affine:4, and affine:4 from the middle on)")
    peak.add_argument("--heads", type=positive, default=4, metavar="N", help="query heads of 64, two to a KV head (default: 4)")
    peak.set_defaults(run=run_bench_peak)
    concurrent = benches.add_parser("concurrent", help="requests at once under a KV scheme, against one after another under mlx-lm's --kv-bits")
    concurrent.add_argument("--scheme", default="affine:4", metavar="SCHEME", help="affine:BITS[:GROUP][@START] (default: affine:4)")
    concurrent.add_argument("--requests", type=positive, default=4, metavar="N", help="requests at once (default: 4)")
    concurrent.add_argument("--prefix-tokens", type=positive, default=256, metavar="N", help="length of each prompt (default: 256)")
    concurrent.add_argument("--decode-tokens", type=positive, default=96, metavar="N", help="tokens of each answer (default: 96)")
    concurrent.add_argument("--repeats", type=positive, default=3, metavar="R", help="pairs of measurements (default: 3)")
    concurrent.set_defaults(run=run_bench_concurrent)
    guard = benches.add_parser("guard", help="decode speed with the memory guard over that without")
    guard.add_argument("--decode-tokens", type=positive, default=600, metavar="N", help="tokens decoded in each measurement (default: 600)")
    guard.add_argument("--repeats", type=positive, default=8, metavar="R", help="pairs of measurements (default: 8)")
    guard.set_defaults(run=run_bench_guard)
    for parser in (restart, overhead, writes, stall, index, checkpoint, schemes, concurrent, guard):
        parser.add_argument("--model", required=True, metavar="DIR", help="directory or hub name of a model")
    restoring = benches.add_parser("restore", help="speed of a restore over that of a raw read of the same files, warm and cold")
    restoring.add_argument("--tokens", type=positive, default=6000, metavar="N", help="tokens of the entry, each 131 kB (default: 6000)")
    restoring.add_argument("--segments", type=positive, default=8, metavar="N", help="files of the chain (default: 8)")
    restoring.add_argument("--repeats", type=positive, default=7, metavar="R", help="rounds, each with every way to read (default: 7)")
    restoring.add_argument("--directory", type=Path, metavar="DIR", help="make the files in a temporary directory under DIR")
    restoring.set_defaults(run=run_bench_restore)
    endurance.add_parsers(benches)
    start_up = benches.add_parser("start-up", help="what the start-up file costs an unrelated script")
    start_up.add_argument("--repeats", type=positive, default=40, metavar="R", help="starts with and without it (default: 40)")
    start_up.set_defaults(run=run_bench_start_up)
    kernels = benches.add_parser("kernels", help="decode attention on a GPU: self-test, microseconds a step, steps of a whole model")
    kernels.add_argument("parts", nargs="*", metavar="PART", help="of self-test, steps, sweep, model (default: all but sweep)")
    kernels.add_argument("--sweep", action="store_true", help="also measure every way to cut up the work")
    kernels.set_defaults(run=run_bench_kernels)
    for parser in (restart, overhead, writes, stall, index, checkpoint, schemes, concurrent, guard, restoring, start_up, kernels, peak):
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
    return _run_rows(args, lambda: schemes.run(path, args.schemes.split(","), args.tokens, args.decode_tokens, args.repeats))


def run_bench_peak(args: argparse.Namespace) -> int:
    from .. import openblas

    openblas.load()
    from ..bench import peak

    return _run_rows(
        args,
        lambda: peak.run(args.tokens, args.schemes and args.schemes.split(","), heads=args.heads),
        lambda result: ["a scheme's peak is above that of full precision"] if result["peak_ratio_max"] > 1 else [],
    )


def _run_rows(
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
    if result:
        print(report.table(result["rows"]))
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
    return int(any(not row["ok"] for row in result.get("self-test", ())))


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
