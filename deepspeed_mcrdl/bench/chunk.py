"""Where chunks pay: large calls on the world, whole and in chunks of several sizes, and how long an all-to-all takes
that is issued while a large all_reduce is under way.

Whole and cut calls are made in turns in one run, in an order drawn anew for each round, by each way without what
routing adds; figures are medians of the slowest rank, and every result is checked. The all-to-all is a blocking one of
`--small` bytes by the same way, right after an asynchronous all_reduce of the largest of `--sizes`; "both" is the time
until the all_reduce is done too.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import DIRECT, carrier
from deepspeed_mcrdl.bench.cases import Issue, make_case
from deepspeed_mcrdl.bench.job import add_ranks_option, job, starts_ranks
from deepspeed_mcrdl.bench.measure import WARM_UP, Meter, reaching
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.config import CUTTABLE, ChunkBlock
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import OPERATIONS, Operation
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.transforms.chunk import Chunks
from deepspeed_mcrdl.work import Work

WHOLE = "whole"
_SPREAD = ("median", "p10", "p90")
_TIMEOUT_S = 900.0


class InChunks:
    """A way to make calls in chunks of one size.

    Args:
        name: the backend, or pair of backends.
        runtime: the runtime of the job.
        group: the group of the calls; every member makes this.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, name: str, runtime: Runtime, group: Group, chunk_bytes: int) -> None:
        self._way, self._group, self._progress = runtime.ways[name], group, runtime.progress
        block = ChunkBlock(operations=CUTTABLE, min_call_bytes=0, max_bytes=chunk_bytes)
        self._chunks = Chunks(block, None, runtime.groups, runtime.progress, runtime.fitted)
        self._fit = runtime.fitted
        for own in self._chunks.groups_of(self._way, group):
            runtime.join(self._way, own)

    def close(self) -> None:
        """Free the communicators."""
        for own in self._chunks.leave(self._group):
            self._way.leave(own)

    def issue(self, operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        """Make a call; a carrier (bench/carriers.py)."""
        way, group = self._way, self._group
        method = self._chunks.method(way, operation, group, args) or self._fit(way, operation, group, args)
        if operation is ops.ALL_TO_ALL_SINGLE:
            method = self._chunks.first([way], method)
        pending = method(group, *args)
        call = Call(operation, group, way.name, 0)
        if async_op:
            return Work(pending, call, self._progress)
        return self._progress.finish(pending.poll, pending, call)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench chunk`."""
    add_ranks_option(parser)
    parser.add_argument("--backends", type=options.names, default=["auto"], help="comma-separated; auto: all usable")
    parser.add_argument("--sizes", type=options.sizes, default="1M,4M", help="bytes of a call: 1M,4M or 256K:16M")
    parser.add_argument("--chunks", type=options.sizes, default="256K,1M", help="bytes of a chunk")
    parser.add_argument("--small", type=options.size, default="64K", help="bytes of the all-to-all issued meanwhile")
    parser.add_argument("--rounds", type=options.at_least(1), default=15, help="rounds of each kind (default: 15)")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    status = starts_ranks(args, _TIMEOUT_S)
    if status is not None:
        return status
    with job({"tuning": {"table": None}}) as runtime:
        names = ways(runtime) if args.backends == ["auto"] else args.backends
        for name in names:
            options.known("backend", name, ways(runtime))
        rows, meanwhile = [], []
        for name in names:
            bench = _Bench(runtime, name, args.chunks)
            rows += [bench.row(operation, size, args.rounds) for operation in CUTTABLE for size in args.sizes]
            meanwhile.append(bench.meanwhile(max(args.sizes), args.small, args.rounds))
            bench.end()
        if runtime.rank == 0:
            _print(rows, f"{runtime.world_size} ranks, whole and in chunks", ("operation", "bytes"), ("us",))
            title = f"all-to-all of {args.small} bytes beside an all_reduce of {max(args.sizes)}"
            _print(meanwhile, title, ("all-to-all",), ("first_us", "both_us"))
            if args.json:
                write_json(args.json, "chunk", [*rows, *meanwhile], rounds=args.rounds, small=args.small)
        wrong = [row["backend"] for row in (*rows, *meanwhile) if row["wrong"]]
        if wrong and runtime.rank == 0:
            print(f"mcrdl: error: wrong results of {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    return 1 if wrong else 0


def ways(runtime: Runtime) -> list[str]:
    """Return the backends and pairs that reach all ranks, in order of preference."""
    world = runtime.groups.world
    pairs = [name for name, way in runtime.ways.items() if name not in runtime.backends]
    return reaching(runtime, world) + [name for name in pairs if runtime.ways[name].misfit(world.mesh) is None]


class _Bench:
    def __init__(self, runtime: Runtime, name: str, chunks: Sequence[int]) -> None:
        self._runtime, self._name, self._world = runtime, name, runtime.groups.world
        self._meter = Meter(runtime, self._world)
        self._cut = {str(size): InChunks(name, runtime, self._world, size) for size in chunks}

    def _ways(self) -> dict[str, Issue]:
        whole = carrier(DIRECT + self._name, self._runtime, self._world)  # keeps what it knows of a case's calls
        return {WHOLE: whole, **{size: cut.issue for size, cut in self._cut.items()}}

    def end(self) -> None:
        """Free the communicators."""
        for cut in self._cut.values():
            cut.close()

    def row(self, operation: str, size: int, rounds: int) -> dict[str, Any]:
        """Return the figures of one operation and size; every rank has the same."""
        case = make_case(operation, self._world, size)
        cut = {way: issue for way, issue in self._ways().items() if way == WHOLE or int(way) < size}
        samples = self._meter.measure(case, cut, 0, rounds)
        row: dict[str, Any] = {"backend": self._name, "operation": operation, "bytes": case.bytes}
        return row | _figures({way: {"us": us} for way, us in samples.us.items()}, sum(samples.wrong.values()))

    def meanwhile(self, size: int, small: int, rounds: int) -> dict[str, Any]:
        """Return how long an all-to-all takes beside an all_reduce; every rank has the same."""
        large, first = (
            make_case(name, self._world, bytes) for name, bytes in zip(CUTTABLE, (size, small), strict=True)
        )
        ways = self._ways()
        took: dict[str, dict[str, list[float]]] = {way: {"first_us": [], "both_us": []} for way in ways}
        wrong = 0
        order = random.Random(size)
        for _ in range(rounds + WARM_UP):
            for way in order.sample(list(ways), len(ways)):
                large.prepare()
                first.prepare()
                self._meter.align()
                start = time.perf_counter()
                works = large.start(ways[way])
                began = time.perf_counter()
                first.run(ways[way])
                took[way]["first_us"].append((time.perf_counter() - began) * 1e6)
                for work in works:
                    work.wait()
                took[way]["both_us"].append((time.perf_counter() - start) * 1e6)
                wrong += not (large.right() and first.right())
        worst = {way: {what: self._meter.worst(us[WARM_UP:]) for what, us in own.items()} for way, own in took.items()}
        row = {"backend": self._name, "operation": OPERATIONS[CUTTABLE[0]].name, "all-to-all": small}
        return row | _figures(worst, int(self._meter.worst([float(wrong)])[0]))


def _figures(samples: Mapping[str, Mapping[str, list[float]]], wrong: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"ways": {}, "wrong": wrong}
    for way, own in samples.items():
        spread = {what: numpy.percentile(us, [50, 10, 90]).tolist() for what, us in own.items()}
        figures["ways"][way] = {what: dict(zip(_SPREAD, us, strict=True)) for what, us in spread.items()}
    return figures


def _print(rows: Sequence[dict[str, Any]], title: str, columns: Sequence[str], figures: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} (us: median, 10th to 90th percentile)")
    for column in ("backend", *columns, "chunk", *figures, "whole / this", "#wrong"):
        table.add_column(column.removesuffix("_us"), justify="left" if column == "backend" else "right")
    for row in rows:
        whole = row["ways"][WHOLE][figures[0]]["median"]
        for way, own in row["ways"].items():
            spread = (f"{own[f]['median']:.0f} ({own[f]['p10']:.0f} - {own[f]['p90']:.0f})" for f in figures)
            what = (str(row[column]) for column in columns)
            ratio = whole / own[figures[0]]["median"]
            table.add_row(row["backend"], *what, way, *spread, f"{ratio:.2f}", str(row["wrong"]))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
