"""What routing adds to a call: the same call through deepspeed.comm's backend object and made directly on the backend.

The two are timed in turns, call by call, in one run; figures are medians of the slowest rank in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.launch import run_ranks, under_launcher
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.operations import BARRIER
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.work import Pending

_WARM_UP = 20
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A call made both ways, and how to see that its result is right.

    Attributes:
        operation: name in the catalogue.
        direct: calls the backend's method.
        routed: calls the face's method with the signature that deepspeed.comm uses.
        reset: spoils the result.
        right: whether the result is right.
    """

    operation: str
    direct: Callable[[], Any]
    routed: Callable[[], Any]
    reset: Callable[[], Any]
    right: Callable[[], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench overhead`."""
    parser.add_argument(
        "--ranks", type=options.at_least(1), help="start this many ranks here (default: run under your launcher)"
    )
    parser.add_argument("--backends", type=options.names, default=["auto"], help="comma-separated; auto: all usable")
    parser.add_argument("--sizes", type=options.sizes, default="256,64K,1M", help="bytes: 256,64K,1M or 256:16M")
    parser.add_argument("--iterations", type=options.at_least(1), default=1000, help="timed calls of each kind")
    parser.add_argument("--checked", action="store_true", help="what the ranks' comparing of calls adds, too")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    if args.ranks is not None and not under_launcher():
        return run_ranks(sys.argv[1:], args.ranks, _TIMEOUT_S)
    if not under_launcher():
        raise ConfigError("give --ranks N, or start under deepspeed, torchrun or mpirun")
    import deepspeed
    from deepspeed.comm import comm

    deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    face = comm.cdb
    usable = list(face.runtime.backends)
    names = usable if args.backends == ["auto"] else args.backends
    rows = []
    for name in names:
        face.restart(parse({"routing": {"default": name}, "checked": args.checked, "banner": False}))
        for size in args.sizes:
            rows += [_measure(face, name, size, case, args.iterations) for case in _cases(face, name, size)]
    if face.get_rank() == 0:
        _print(rows)
        if args.json:
            write_json(args.json, "overhead", [_public(row) for row in rows], iterations=args.iterations)
    face.destroy_process_group()
    return 0 if all(row["wrong"] == 0 for row in rows) else 1


def _cases(face: Any, name: str, size: int) -> Iterator[Case]:
    runtime = face.runtime
    backend, world, ranks, rank = runtime.backends[name], runtime.groups.world, runtime.world_size, runtime.rank
    count = max(ranks, size // 4 // ranks * ranks)
    tensor = torch.empty(count)

    def direct(pending: Pending) -> None:
        runtime.progress.finish(pending.poll, pending, Call(BARRIER, world, name, 0))

    yield Case(
        "all_reduce",
        lambda: direct(backend.all_reduce(world, tensor, "max")),
        lambda: face.all_reduce(tensor, torch.distributed.ReduceOp.MAX, None, False),
        lambda: tensor.fill_(rank),
        lambda: bool((tensor == ranks - 1).all()),
    )
    yield Case(
        "broadcast",
        lambda: direct(backend.broadcast(world, tensor, 0)),
        lambda: face.broadcast(tensor=tensor, src=0, group=None, async_op=False),
        lambda: tensor.fill_(rank + 1),
        lambda: bool((tensor == 1).all()),
    )
    output, block = torch.empty(count), torch.full((count // ranks,), float(rank))
    by_rank = torch.arange(ranks).repeat_interleave(count // ranks)
    yield Case(
        "all_gather_into_tensor",
        lambda: direct(backend.all_gather_into_tensor(world, output, block)),
        lambda: face.all_gather_into_tensor(output_tensor=output, input_tensor=block, group=None, async_op=False),
        lambda: output.fill_(-1),
        lambda: bool((output == by_rank).all()),
    )
    source = torch.full((count,), float(rank))
    yield Case(
        "all_to_all_single",
        lambda: direct(backend.all_to_all_single(world, output, source, None, None)),
        lambda: face.all_to_all_single(
            output=output, input=source, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
        ),
        lambda: output.fill_(-1),
        lambda: bool((output == by_rank).all()),
    )


def _measure(face: Any, name: str, size: int, case: Case, iterations: int) -> dict[str, Any]:
    wrong = 0
    times: dict[str, list[float]] = {"direct": [], "routed": []}
    for way in ("direct", "routed"):
        case.reset()
        getattr(case, way)()
        wrong += not case.right()
    for iteration in range(_WARM_UP + iterations):
        for way in ("direct", "routed") if iteration % 2 else ("routed", "direct"):
            call = getattr(case, way)
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if iteration >= _WARM_UP:
                times[way].append(elapsed * 1e6)
    figures = torch.tensor([*times["direct"], *times["routed"], float(wrong)], dtype=torch.float64)
    face.all_reduce(figures, torch.distributed.ReduceOp.MAX)
    *slowest, wrong_anywhere = figures.tolist()
    direct, routed = statistics.median(slowest[:iterations]), statistics.median(slowest[iterations:])
    return {
        "operation": case.operation,
        "bytes": size,
        "backend": name,
        "direct_us": direct,
        "routed_us": routed,
        "extra_us": routed - direct,
        "ratio": routed / direct,
        "wrong": int(wrong_anywhere),
    }


def _public(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "wrong"}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="routed call against the same call made on the backend (median of the slowest rank)")
    for title in ("operation", "bytes", "backend", "direct us", "routed us", "extra us", "ratio", "#wrong"):
        table.add_column(title, justify="left" if title in ("operation", "backend") else "right")
    for row in rows:
        table.add_row(
            row["operation"],
            str(row["bytes"]),
            row["backend"],
            *(f"{row[key]:.1f}" for key in ("direct_us", "routed_us", "extra_us")),
            f"{row['ratio']:.3f}",
            str(row["wrong"]),
        )
    Console().print(table)
