"""How near shared memory comes to the least that a call between ranks must do: copy its bytes in, and as many out.

The floor of S bytes is that copying alone, by all ranks at once: each copies a tensor into memory of its own, and what
is in its neighbour's to the same tensor, in chunks that stay in the caches, without a word between the ranks. Beside
it, in turns in one run, all_reduce and all_to_all_single of S bytes by the backend shm; the latter takes a part of its
bytes straight to its own output, so it can be below. Each is called a few times in a row, of which the first is not
counted, so that all find their data in the caches. Figures are medians of the slowest rank, and every result is
checked.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from deepspeed_mcrdl.backends.shm import SLOT_BYTES, ShmBackend
from deepspeed_mcrdl.backends.shm_segments import make_segment
from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import carrier
from deepspeed_mcrdl.bench.cases import make_case
from deepspeed_mcrdl.bench.job import add_ranks_option, job, starts_ranks
from deepspeed_mcrdl.bench.measure import Meter
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.stores import Patient

_OPERATIONS = ("all_reduce", "all_to_all_single")
_FLOOR = "floor"
_TIMEOUT_S = 600.0
_WARM_UP = 5
_IN_A_ROW = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench floor`."""
    add_ranks_option(parser)
    parser.add_argument("--sizes", type=options.sizes, default="256,4K,64K,1M,16M", help="bytes: 256,64K or 256:16M")
    parser.add_argument("--iterations", type=options.at_least(1), default=200, help="rounds (default: 200)")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    reason = ShmBackend.unusable()
    if reason is not None:
        raise ConfigError(f"the backend shm is not usable here: {reason}")
    status = starts_ranks(args, _TIMEOUT_S)
    if status is not None:
        return status
    with job({"backends": ["shm"], "tuning": {"table": None}}) as runtime:
        if runtime.groups.world.mesh.nodes > 1:
            raise ConfigError("the floor is that of one host")
        bench = _Bench(runtime)
        rows = [bench.row(size, args.iterations) for size in args.sizes]
        if runtime.rank == 0:
            _print(rows, runtime.world_size)
            if args.json:
                write_json(args.json, "floor", rows, iterations=args.iterations)
        wrong = [row["bytes"] for row in rows if row["wrong"]]
        if wrong and runtime.rank == 0:
            print(f"mcrdl: error: wrong results of {', '.join(map(str, wrong))} bytes", file=sys.stderr)
    return 1 if wrong else 0


class _Bench:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._meter = Meter(runtime, runtime.groups.world)
        store = Patient(runtime.groups.store)
        ranks = range(runtime.world_size)
        descriptor, _ = make_segment(store, runtime.rank, "floor", ranks, lambda size: size * len(ranks), [SLOT_BYTES])
        self._memory = torch.frombuffer(mmap.mmap(descriptor, SLOT_BYTES * len(ranks)), dtype=torch.uint8)
        os.close(descriptor)
        self._own, self._other = (
            self._memory.data_ptr() + rank % len(ranks) * SLOT_BYTES for rank in (runtime.rank, runtime.rank + 1)
        )

    def row(self, size: int, rounds: int) -> dict[str, Any]:
        """Return the figures of one size; every rank has the same."""
        from deepspeed_mcrdl.backends import _shm

        world = self._runtime.groups.world
        cases = {name: make_case(name, world, size) for name in _OPERATIONS}
        issue = carrier(ShmBackend.name, self._runtime, world)
        tensor = torch.empty(size, dtype=torch.uint8)
        took: dict[str, list[float]] = {name: [] for name in (_FLOOR, *_OPERATIONS)}
        wrong = 0
        order = random.Random(size)
        for _ in range(rounds + _WARM_UP):
            names = order.sample(list(took), len(took))
            for name in (name for name in names for _ in range(_IN_A_ROW)):
                case = cases.get(name)
                if case is None:
                    self._memory[self._own - self._memory.data_ptr() :][:SLOT_BYTES] = world.rank
                    tensor.fill_(world.rank)
                else:
                    case.prepare()
                self._meter.align()
                start = time.perf_counter()
                if case is None:
                    _shm.copy_through(tensor.data_ptr(), self._own, self._other, tensor.data_ptr(), size, SLOT_BYTES)
                else:
                    case.run(issue)
                took[name].append((time.perf_counter() - start) * 1e6)
                right = case.right() if case else bool((tensor == (world.rank + 1) % world.size).all())
                wrong += not right
        us = {}
        for name, values in took.items():
            values = values[_WARM_UP * _IN_A_ROW :]
            us[name] = self._meter.worst([value for place, value in enumerate(values) if place % _IN_A_ROW])
        row: dict[str, Any] = {"bytes": size, "wrong": int(self._meter.worst([float(wrong)])[0])}
        for name, samples in us.items():
            low, median, high = numpy.percentile(samples, [10, 50, 90])
            row |= {f"{name}_us": median, f"{name}_p10_us": low, f"{name}_p90_us": high}
        return row | {f"{name}_ratio": row[f"{name}_us"] / row[f"{_FLOOR}_us"] for name in _OPERATIONS}


def _print(rows: Sequence[dict[str, Any]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{ranks} ranks: copying in and out, and calls by shm (us: median, 10th to 90th percentile)")
    for title in ("bytes", _FLOOR, *(text for name in _OPERATIONS for text in (name, "ratio")), "#wrong"):
        table.add_column(title, justify="right")
    for row in rows:
        figures = [_spread(row, _FLOOR)]
        for name in _OPERATIONS:
            figures += [_spread(row, name), f"{row[f'{name}_ratio']:.2f}"]
        table.add_row(str(row["bytes"]), *figures, str(row["wrong"]))
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_us']:.1f} ({row[f'{name}_p10_us']:.1f} - {row[f'{name}_p90_us']:.1f})"
