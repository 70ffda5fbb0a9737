"""Where fusion pays: many small asynchronous all_reduces, then a wait for each, one by one and fused.

All are issued on the world before the first is waited for, as gradients are; unfused they are made on the backend
itself, without what routing adds. Both are called in turns in one run, in an order drawn anew for each round; figures
are medians of the slowest rank, and every result is checked.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import DIRECT, carrier
from deepspeed_mcrdl.bench.cases import Issue
from deepspeed_mcrdl.bench.job import add_ranks_option, job, starts_ranks
from deepspeed_mcrdl.bench.measure import WARM_UP, Meter
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.config import FusionBlock
from deepspeed_mcrdl.operations import ALL_REDUCE
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.transforms.fusion import MAX_BYTES

_WAYS = _APART, _FUSED = "apart", "fused"
_PAYS = 1.1  # a smaller gain is within the noise
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench fusion`."""
    add_ranks_option(parser)
    parser.add_argument("--backends", type=options.names, default=["auto"], help="comma-separated; auto: all usable")
    parser.add_argument(
        "--sizes", type=options.sizes, default="256,4K,16K,64K", help="bytes of a call: 256,4K or 1K:64K"
    )
    parser.add_argument("--calls", type=options.at_least(1), default=256, help="calls in a round (default: 256)")
    for name, default in (("max_bytes", MAX_BYTES), ("max_calls", FusionBlock().max_calls)):
        text = f'"{name}" of the "fusion" block (default: {default})'
        parser.add_argument(f"--{name.replace('_', '-')}", type=options.at_least(1), default=default, help=text)
    parser.add_argument("--rounds", type=options.at_least(1), default=15, help="rounds of each kind (default: 15)")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    status = starts_ranks(args, _TIMEOUT_S)
    if status is not None:
        return status
    block = {"max_call_bytes": max(args.sizes), "max_bytes": max(args.max_bytes, *args.sizes)}
    with job({"tuning": {"table": None}, "fusion": {**block, "max_calls": args.max_calls}}) as runtime:
        names = list(runtime.backends) if args.backends == ["auto"] else args.backends
        for name in names:
            options.known("backend", name, runtime.backends)
        bench = _Bench(runtime, args.calls)
        rows = [bench.row(name, size, args.rounds) for name in names for size in args.sizes]
        if runtime.rank == 0:
            _print(rows, runtime.world_size, args.calls)
            if args.json:
                write_json(args.json, "fusion", rows, calls=args.calls, rounds=args.rounds, **block)
        wrong = [f"{row['backend']} at {row['bytes']} bytes" for row in rows if row["wrong"]]
        if wrong and runtime.rank == 0:
            print(f"mcrdl: error: wrong results of {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


class _Bench:
    def __init__(self, runtime: Runtime, calls: int) -> None:
        self._runtime, self._calls = runtime, calls
        self._meter = Meter(runtime, runtime.groups.world)

    def row(self, name: str, size: int, rounds: int) -> dict[str, Any]:
        """Return the figures of one backend and size; every rank has the same."""
        runtime, world = self._runtime, self._runtime.groups.world
        assert runtime.fusion is not None
        ways = {_APART: carrier(DIRECT + name, runtime, world), _FUSED: carrier(name, runtime, world)}
        tensors = [torch.empty(max(size // 4, 1)) for _ in range(self._calls)]
        took: dict[str, list[float]] = {way: [] for way in ways}
        wrong = 0
        before = runtime.fusion.operations
        order = random.Random(size)
        for _ in range(rounds + WARM_UP):
            for way in order.sample(list(ways), len(ways)):
                for place, tensor in enumerate(tensors):
                    tensor.fill_(world.rank + place)
                took[way].append(self._round(ways[way], tensors))
                ranks = world.size
                sums = (ranks * place + ranks * (ranks - 1) // 2 for place in range(self._calls))
                wrong += sum(not bool((tensor == total).all()) for tensor, total in zip(tensors, sums, strict=True))
        row: dict[str, Any] = {"backend": name, "bytes": size}
        for way, own in took.items():
            low, median, high = numpy.percentile(self._meter.worst(own[WARM_UP:]), [10, 50, 90])
            row |= {f"{way}_us": median, f"{way}_p10_us": low, f"{way}_p90_us": high}
        operations = (runtime.fusion.operations - before) / (rounds + WARM_UP)
        return row | {
            "ratio": row[f"{_APART}_us"] / row[f"{_FUSED}_us"],
            "operations": operations,
            "wrong": int(self._meter.worst([float(wrong)])[0]),
        }

    def _round(self, issue: Issue, tensors: Sequence[torch.Tensor]) -> float:
        """Return the microseconds of all calls."""
        self._meter.align()
        start = time.perf_counter()
        works = [issue(ALL_REDUCE, (tensor, "sum"), True) for tensor in tensors]
        for work in works:
            work.wait()
        return (time.perf_counter() - start) * 1e6


def _print(rows: Sequence[dict[str, Any]], ranks: int, calls: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{ranks} ranks, {calls} all_reduces (us: median, 10th to 90th percentile)")
    for title in ("backend", "bytes", _APART, _FUSED, "ratio", "operations", "#wrong"):
        table.add_column(title, justify="left" if title == "backend" else "right")
    for row in rows:
        table.add_row(
            row["backend"],
            str(row["bytes"]),
            *(f"{row[f'{way}_us']:.0f} ({row[f'{way}_p10_us']:.0f} - {row[f'{way}_p90_us']:.0f})" for way in _WAYS),
            f"{row['ratio']:.2f}",
            f"{row['operations']:.1f}",
            str(row["wrong"]),
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for name in dict.fromkeys(row["backend"] for row in rows):
        sizes = [str(row["bytes"]) for row in rows if row["backend"] == name and row["ratio"] >= _PAYS]
        console.print(f"{name}: it pays at {', '.join(sizes)} bytes" if sizes else f"{name}: it does not pay")
