"""`mcrdl tune`: measures the usable backends on what a job needs and writes the tuning table.

The first pass measures every cell (operation, mesh, dtype, size) briefly, the ends of each row of sizes first, so that
there is a whole table at any time. Every cell is visited again later, and a third time if its choice is not the
preferred backend, since a disturbance of the machine can outlast a visit. What is left of the budget goes to cells
where more samples could change the choice, those with more calls first, and to sizes between two whose choices differ.
A sweep that is killed goes on where it was when it is started again with the same options.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from deepspeed_mcrdl.backends.base import classes_of
from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import carrier
from deepspeed_mcrdl.bench.cases import DTYPES, Case, chosen, make_case
from deepspeed_mcrdl.bench.job import (
    ALL,
    add_meshes_option,
    add_ranks_option,
    in_a_rank,
    job,
    measured_groups,
    starts_ranks,
)
from deepspeed_mcrdl.bench.measure import Meter
from deepspeed_mcrdl.composed import broadcast_object_list
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.machine import process_age_s
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.routing.shelf import own_tables
from deepspeed_mcrdl.routing.table import Bucket, Chunk, Entry, Fingerprint, Measurement, Table, today
from deepspeed_mcrdl.runtime import Runtime, key_of
from deepspeed_mcrdl.tuning import evidence, sizes
from deepspeed_mcrdl.tuning.dry_run import dry_run
from deepspeed_mcrdl.tuning.plan import Cell, coarse_first, from_record, grid

BEGAN = "MCRDL_TUNE_BEGAN"  # when the command was given, for ranks that it has started

_FIRST_PASS = 0.35  # of the budget
_VISITS, _VISITS_IF_UNUSUAL = 2, 3
_LEAST_CELL_S, _MOST_CELL_S = 0.02, 0.5
_AT_THE_END_S = 4.0  # for the last cell, writing the table and ending the job
_SIZES, _MOST_SIZES_S = 0.1, 15.0  # of the budget, for buckets and chunks
_MOST_SAMPLES = 2000
_LEAST_RATIO = 2.0  # of neighbouring sizes between which another is measured
_SAVE_EVERY_S = 5.0
_ROUNDING = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl tune`."""
    add_ranks_option(parser)
    parser.add_argument("--budget", type=options.seconds, default="120s", help="time for all, such as 90s or 10m")
    parser.add_argument(
        "--output", type=options.output_file, metavar="FILE", help="the table (default: where jobs look for tables)"
    )
    parser.add_argument("--ops", type=options.names, default=["all"], help="comma-separated operations (default: all)")
    parser.add_argument("--sizes", type=options.sizes, default="256:16M", help="bytes: 256,64K,1M or 256:16M")
    parser.add_argument("--dtypes", type=options.names, default=["float32"], help=", ".join(DTYPES))
    parser.add_argument("--backends", type=options.names, help="comma-separated (default: all usable)")
    add_meshes_option(parser, ALL)
    parser.add_argument(
        "--from-log", type=Path, metavar="FILE", help="measure what a job has recorded (tuning.record), by its calls"
    )
    parser.add_argument("--job", metavar="COMMAND", help="run this command first and measure what it calls")
    parser.add_argument("--job-time", type=options.seconds, default="2m", help="end it after this time (default: 2m)")


def main(args: argparse.Namespace) -> int:
    """Measure and write the table; returns 0, or 1 if a result was wrong."""
    began = time.time() - process_age_s()
    names = chosen(args.ops)
    for dtype in args.dtypes:
        options.known("dtype", dtype, DTYPES)
    more = []
    if args.job is not None and not in_a_rank():
        args.from_log = dry_run(args.job, args.job_time)
        began = time.time()
        more = ["--from-log", str(args.from_log)]
    if args.from_log is not None:
        from_record(args.from_log)  # a wrong one is an error before anything is started
    os.environ.setdefault(BEGAN, str(began))
    status = starts_ranks(args, args.budget + 60, more)
    if status is not None:
        return status
    config: dict[str, Any] = {"tuning": {"table": None}}
    if args.backends:
        config["backends"] = args.backends
    with job(config) as runtime:
        cells = from_record(args.from_log) if args.from_log else None
        meshes = ",".join(dict.fromkeys(cell.mesh for cell in cells)) if cells else args.meshes
        groups = {str(group.mesh): group for group in measured_groups(runtime, meshes)}
        cells = cells or grid(list(groups), names, args.dtypes, args.sizes)
        deadline = time.monotonic() + args.budget - (time.time() - float(os.environ[BEGAN])) - _AT_THE_END_S
        output = args.output or own_tables() / f"{runtime.world_size}-ranks.json"
        sizes_s = min(_SIZES * args.budget, _MOST_SIZES_S)
        deadline -= sizes_s
        sweep = _Sweep(runtime, groups, sizes_s)
        if runtime.rank != 0:
            sweep.follow()
            return 0
        output.parent.mkdir(parents=True, exist_ok=True)
        conductor = Conductor(cells, list(runtime.ways), _Partial(output, _plan_of(args, runtime)))
        wrong = sweep.lead(conductor, deadline)
        if wrong:
            print(f"mcrdl: error: wrong results, so no table is written: {'; '.join(wrong)}", file=sys.stderr)
            return 1
        table = conductor.table(runtime, sweep.sizes)
        table.write(output)
        conductor.partial.remove()
        _print(table, output)
    return 0


class _Sweep:
    """Measures cells on all ranks at once, told by rank 0 which."""

    def __init__(self, runtime: Runtime, groups: Mapping[str, Group], sizes_s: float) -> None:
        self._runtime = runtime
        self._sizes_s = sizes_s  # after the deadline, for buckets and chunks
        self._groups = groups
        self._meters = {mesh: Meter(runtime, group) for mesh, group in groups.items()}
        self.sizes: list[Bucket | Chunk] = []

    def lead(self, conductor: Conductor, deadline: float) -> list[str]:
        """Measure until the conductor is content or time is over; return what gave wrong results. For rank 0."""
        wrong: list[str] = []
        began = time.monotonic()
        with _progress(deadline - began) as show:
            while (step := conductor.next(deadline)) is not None:
                cell, seconds = step
                show(str(conductor), time.monotonic() - began)
                samples, faults = self._measure(*self._tell((cell, seconds)))
                conductor.take(cell, samples)
                wrong += [f"{cell.name} of {cell.size} bytes by {name}" for name, count in faults.items() if count]
            for what in sizes.what(self._runtime):
                if time.monotonic() > deadline + self._sizes_s:
                    logger.info("no time was left to measure buckets and chunks from %s by %s on", *what)
                    break
                show("buckets and chunks", time.monotonic() - began)
                self._take(sizes.measure(self._runtime, *self._tell(what)))
        self._tell(None)
        return wrong

    def _take(self, found: Bucket | Chunk | None) -> None:
        if found is not None:
            self.sizes.append(found)

    def follow(self) -> None:
        """Measure what rank 0 says. For the other ranks."""
        while (step := self._tell(None)) is not None:
            if isinstance(step[0], Cell):
                self._measure(*step)
            else:
                sizes.measure(self._runtime, *step)

    def _tell(self, step: tuple[Cell, float] | tuple[str, str] | None) -> Any:
        told = [step]
        broadcast_object_list(self._runtime, None, told, 0)
        return told[0]

    def _measure(self, cell: Cell, seconds: float) -> tuple[dict[str, list[float]], dict[str, int]]:
        group = self._groups[cell.mesh]
        case = make_case(cell.name, group, cell.size, DTYPES[cell.dtype])
        carriers = {name: carrier(name, self._runtime, group) for name in self._able(case, group)}
        if not carriers:
            return {}, {}
        samples = self._meters[cell.mesh].measure(case, carriers, seconds)
        return samples.rounds_us, samples.wrong

    def _able(self, case: Case, group: Group) -> list[str]:
        operation, args = case.calls[0]
        return self._runtime.router.able(key_of(operation, group, args))


class Conductor:
    """Says what to measure next, and makes the table of it.

    Args:
        weights: the cells to measure and how much each matters.
        preferred: the backends, the most preferred first.
        partial: where samples are kept in case the sweep is killed.
    """

    def __init__(self, weights: Mapping[Cell, float], preferred: list[str], partial: _Partial) -> None:
        self._weights = dict(weights)
        self._preferred = preferred
        self.partial = partial
        self._samples: dict[Cell, dict[str, list[float]]] = partial.load()
        self._visits: dict[Cell, int] = dict.fromkeys(self._samples, 1)
        self._first = [cell for cell in coarse_first(weights) if cell not in self._samples]
        self._planned = len(self._first) + len(self._samples)
        self._open: dict[tuple[str, str, str], list[Cell]] = {}
        self._started = time.monotonic()
        for line in {cell.line for cell in self._samples}:
            self._look_at(line)

    def __str__(self) -> str:
        done = self._planned - len(self._first)
        return f"{done} of {self._planned} cells" if self._first else f"{sum(map(len, self._open.values()))} unsettled"

    def next(self, deadline: float) -> tuple[Cell, float] | None:
        """Return a cell and for how many seconds to measure it; None at the end."""
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if self._first:
            first_pass = _FIRST_PASS * (deadline - self._started) - (time.monotonic() - self._started)
            seconds = max(first_pass, 0) / len(self._first)
            return self._first.pop(0), min(max(seconds, _LEAST_CELL_S), _MOST_CELL_S)
        unsettled = [cell for cells in self._open.values() for cell in cells]
        if not unsettled:
            return None
        cell = min(unsettled, key=lambda cell: (self._visits.get(cell, 0), -self._weights[cell], cell.size))
        return cell, min(max(left / len(unsettled), _LEAST_CELL_S), _MOST_CELL_S, left)

    def take(self, cell: Cell, samples: Mapping[str, list[float]]) -> None:
        """Take the samples of a cell."""
        if samples:
            own = self._samples.setdefault(cell, {})
            for name, us in samples.items():
                own.setdefault(name, []).extend(round(value, 2) for value in us)
        self._visits[cell] = self._visits.get(cell, 0) + 1
        self._look_at(cell.line)
        self.partial.save(self._samples)

    def _look_at(self, line: tuple[str, str, str]) -> None:
        """Find out which cells of a line need more samples, and which new ones lie between two different choices."""
        cells = {cell.size: cell for cell in self._samples if cell.line == line}
        by_size = {size: self._samples[cell] for size, cell in cells.items()}
        choice = evidence.choose(by_size, self._preferred)
        unsettled = []
        for size, samples in by_size.items():
            usual = next(name for name in self._preferred if name in samples)
            visits = _VISITS if choice[size] == usual else _VISITS_IF_UNUSUAL
            few = len(samples) > 1 and self._visits.get(cells[size], 0) < visits
            enough = len(next(iter(samples.values()))) >= _MOST_SAMPLES
            if few or (not enough and evidence.unsettled(samples, choice[size])):
                unsettled.append(cells[size])
        sizes = sorted(choice)
        for small, large in itertools.pairwise(sizes):
            between = int(math.sqrt(small * large)) // _ROUNDING * _ROUNDING
            if choice[small] != choice[large] and large > _LEAST_RATIO * small and small < between < large:
                cell = Cell(cells[small].mesh, cells[small].name, cells[small].dtype, between)
                self._weights.setdefault(cell, self._weights[cells[small]])
                unsettled.append(cell)
        self._open[line] = unsettled

    def table(self, runtime: Runtime, found: Sequence[Bucket | Chunk]) -> Table:
        """Return the table of all that was measured, with what was `found` of sizes."""
        by_line: dict[tuple[str, str, str], dict[int, Cell]] = defaultdict(dict)
        for cell in self._samples:
            by_line[cell.line][cell.size] = cell
        meshes = {str(group.mesh): group.mesh for group in runtime.groups}
        entries = []
        for (mesh, name, kind), cells in by_line.items():
            by_size = {size: self._samples[cell] for size, cell in cells.items()}
            entries.append(make_entry(name, kind, meshes[mesh], by_size, self._preferred))
        how = shlex.join(["mcrdl", *sys.argv[1:]])
        return Table(
            made=today(),
            how=how,
            fingerprint=Fingerprint.here(classes_of(runtime.backends)),
            entries=tuple(entries),
            buckets=tuple(one for one in found if isinstance(one, Bucket)),
            chunks=tuple(one for one in found if isinstance(one, Chunk)),
        )


def make_entry(
    name: str, kind: Any, mesh: Any, by_size: Mapping[int, Mapping[str, list[float]]], preferred: list[str]
) -> Entry:
    """Return the table's entry for one operation, class of dtypes and mesh."""
    choice = evidence.choose(by_size, preferred)
    measured = [
        Measurement(
            bytes=size,
            backend=backend,
            median_us=round(float(numpy.median(us)), 2),
            p10_us=round(float(numpy.percentile(us, 10)), 2),
            p90_us=round(float(numpy.percentile(us, 90)), 2),
            samples=len(us),
        )
        for size in sorted(by_size)
        for backend, us in by_size[size].items()
    ]
    return Entry(
        operation=name,
        dtype=kind,
        device="cpu",
        mesh=mesh,
        steps=evidence.steps(by_size, choice),
        unsized=evidence.unsized(by_size, choice),
        measured=tuple(measured),
    )


class _Partial:
    """The samples of a sweep that is not done, in a file beside its table.

    Args:
        output: the table's path.
        plan: what the samples are of; those of another plan are not taken up.
    """

    def __init__(self, output: Path, plan: Mapping[str, Any]) -> None:
        self._path = output.with_name(f"{output.name}.partial")
        self._plan = json.loads(json.dumps(plan))
        self._saved = time.monotonic()

    def load(self) -> dict[Cell, dict[str, list[float]]]:
        """Return the samples of a sweep with the same plan that was killed."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["plan"] != self._plan:
                return {}
            samples = {Cell(*cell): us for cell, us in kept["samples"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        logger.info("goes on with the %d cells that %s has", len(samples), self._path)
        return samples

    def save(self, samples: Mapping[Cell, Mapping[str, list[float]]]) -> None:
        """Write the samples now and then."""
        if time.monotonic() - self._saved < _SAVE_EVERY_S:
            return
        self._saved = time.monotonic()
        rows = [[[cell.mesh, cell.name, cell.dtype, cell.size], us] for cell, us in samples.items()]
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text(json.dumps({"plan": self._plan, "samples": rows}), encoding="utf-8")
        part.replace(self._path)

    def remove(self) -> None:
        """The table is written."""
        self._path.unlink(missing_ok=True)


def _plan_of(args: argparse.Namespace, runtime: Runtime) -> dict[str, Any]:
    wanted = {key: value for key, value in vars(args).items() if key not in ("run", "budget", "output")}
    return {"options": str(wanted), "made_on": Fingerprint.here(classes_of(runtime.backends)).model_dump()}


@contextlib.contextmanager
def _progress(seconds: float) -> Iterator[Any]:
    """Yield a function (what is done, seconds passed) that moves a bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("tuning"),
        BarColumn(),
        TextColumn("at most {task.fields[left]:.0f} s left, {task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=max(seconds, 1.0), left=seconds)

        def show(text: str, passed: float) -> None:
            progress.update(task, completed=passed, description=text, left=max(seconds - passed, 0.0))

        yield show


def _print(table: Table, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    shown = Grid(title="what the table says")
    for title in ("operation", "dtypes", "mesh", "backends by size", "samples"):
        shown.add_column(title, justify="right" if title == "samples" else "left")
    for entry in table.entries:
        samples = [measured.samples for measured in entry.measured]
        *bounded, last = entry.steps
        texts = [*(f"{step.backend} up to {step.max_bytes} B" for step in bounded), last.backend]
        counts = f"{min(samples)} to {max(samples)}"
        shown.add_row(entry.operation, entry.dtype, str(entry.mesh), ", then ".join(texts), counts)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(shown)
    for bucket in table.buckets:
        text = "by themselves" if bucket.max_bytes is None else f"together, {bucket.max_bytes} bytes"
        console.print(f"small calls by {bucket.backend}: {text} (gain {bucket.gain:.2f})")
    for chunk in table.chunks:
        text = "whole" if chunk.max_bytes is None else f"in chunks of {chunk.max_bytes} bytes"
        console.print(f"large {chunk.operation} by {chunk.backend}: {text} (gain {chunk.gain:.2f})")
    console.print(f"written to {output}", soft_wrap=True)
