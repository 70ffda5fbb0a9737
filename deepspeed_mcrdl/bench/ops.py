"""Every operation by size and backend, side by side, as nccl-tests shows it.

Times are of the slowest rank, the ranks aligned before each call; backends are called in turns in one run, in an order
drawn anew each round, short calls in blocks; each call's result is checked. time is the median; algbw = size / time;
busbw is what the hardware has to carry for it, by the factors of nccl-tests. Between hosts there are also the bytes
that a host sent for a call, the least that it must send, and the time which that takes at the emulated hosts' rate.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import DIRECT, MPI4PY, TORCH, can_carry, carrier
from deepspeed_mcrdl.bench.cases import DTYPES, Case, chosen, make_case
from deepspeed_mcrdl.bench.job import (
    MESH_FORM,
    add_ranks_option,
    job,
    measured_groups,
    starts_ranks,
)
from deepspeed_mcrdl.bench.measure import Meter, copy_peak_GBps
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.bench.wire import emulated_rate, least_bytes
from deepspeed_mcrdl.config import AUTO
from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.observe.summary import size_text
from deepspeed_mcrdl.operations import REDUCE_OPS
from deepspeed_mcrdl.runtime import Runtime, key_of

_KEYS: dict[str, Callable[[Any], str]] = {
    "operation": str,
    "bytes": str,
    "count": str,
    "dtype": str,
    "redop": str,
    "backend": str,
    "route": str,
    "median_us": "{:.1f}".format,
    "p99_us": "{:.1f}".format,
    "min_us": "{:.1f}".format,
    "algbw_GBps": "{:.3f}".format,
    "busbw_GBps": "{:.3f}".format,
    "wrong": str,
    "best": str,
}
_WIDTH, _OVERLAP_WIDTH = 160, 60
_WIRE_KEYS: dict[str, Callable[[Any], str]] = {"wire_bytes": str, "least_bytes": str, "bound_us": "{:.0f}".format}
_OVERLAP_KEYS = ("issue_us", "wait_us", "compute_us", "both_us", "overlap")
_TITLES = {"median_us": "time us", "p99_us": "p99", "min_us": "min", "algbw_GBps": "algbw GB/s", "busbw_GBps": "busbw"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench ops`."""
    add_ranks_option(parser)
    parser.add_argument("--ops", type=options.names, default=["all"], help="comma-separated operations (default: all)")
    parser.add_argument("--sizes", type=options.sizes, default="256:16M", help="bytes: 256,64K,1M or 256:16M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", metavar="DTYPE", help=", ".join(DTYPES))
    parser.add_argument("--redop", choices=REDUCE_OPS, default="sum")
    parser.add_argument(
        "--backends",
        type=options.names,
        help='comma-separated: a backend, auto, direct:BACKEND, torch:gloo, mpi4py (default: all usable, and "auto")',
    )
    parser.add_argument(
        "--meshes", default="world", help='"world", "all", or such as 1x2/1: nodes x ranks per node / stride'
    )
    parser.add_argument("--table", metavar="FILE", help='the tuning table for "auto" (default: as in a job; "none")')
    parser.add_argument("--seconds", type=float, default=0.3, help="for each operation and size (default: 0.3)")
    parser.add_argument("--iterations", type=options.at_least(1), help="rounds instead")
    parser.add_argument(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="time issue and wait apart, and overlap with a product",
    )
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="limit with --ranks")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")
    parser.add_argument("--csv", type=options.output_file, metavar="FILE", help="write the rows here")
    parser.add_argument("--omb", action="store_true", help="print OSU's table instead")
    parser.add_argument("--plot", type=options.output_file, metavar="FILE", help="draw time by size (PNG)")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right and no figure is beyond the hardware."""
    names = chosen(args.ops)
    if args.plot:
        options.require_matplotlib()
    status = starts_ranks(args, args.timeout)
    if status is not None:
        return status
    tuning = {} if args.table is None else {"table": None if args.table == "none" else args.table}
    with job({"tuning": tuning}) as runtime:
        bench = _Bench(runtime, args)
        rows = [row for group in measured_groups(runtime, args.meshes) for row in bench.rows(group, names)]
        if runtime.rank == 0:
            _show(args, rows)
            return _verdict(rows, bench.copy_peak)
    return 0


class _Bench:
    def __init__(self, runtime: Runtime, args: argparse.Namespace) -> None:
        import torch.distributed as dist

        self._runtime, self._args = runtime, args
        self._names: list[str] = args.backends or [*runtime.ways, AUTO]
        self._torch_gloo = dist.new_group(backend="gloo") if TORCH in self._names else None
        self.copy_peak = copy_peak_GBps()
        for name in self._names:  # a wrong name is an error before the first call
            carrier(name, runtime, runtime.groups.world)

    def rows(self, group: Group, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of all operations and sizes on one group."""
        meter = Meter(self._runtime, group)
        if TORCH in self._names and group is not self._runtime.groups.world:
            raise ConfigError(f"{TORCH} is measured on the world only: leave out --meshes")
        rows: list[dict[str, Any]] = []
        for name in names:
            sizes: set[int] = set()
            for size in self._args.sizes:
                case = make_case(name, group, size, DTYPES[self._args.dtype], self._args.redop)
                if case.bytes not in sizes:
                    sizes.add(case.bytes)
                    rows += self._measure(meter, group, case)
        return rows

    def _measure(self, meter: Meter, group: Group, case: Case) -> list[dict[str, Any]]:
        args, runtime = self._args, self._runtime
        carriers = {
            name: carrier(name, runtime, group, self._torch_gloo)
            for name in self._names
            if self._able(name, group, case)
        }
        if not carriers:
            return []
        samples = meter.measure(case, carriers, args.seconds, args.iterations)
        rows = [self._row(name, group, case, samples.us[name], samples.wrong[name]) for name in carriers]
        if group.mesh.nodes > 1 and case.operation.collective and group.mesh.ranks_per_node:
            least = least_bytes(case.operation, group.mesh, case.bytes)
            rate = emulated_rate()
            for row in rows:
                row["wire_bytes"] = meter.sent(case, carriers[row["backend"]])
                row["least_bytes"] = int(least)
                row["bound_us"] = least * 8 / rate * 1e6 if rate else None
        if args.asynchronous:
            for row in rows:
                issue = carriers[row["backend"]]
                blocks = row["backend"] == MPI4PY
                row |= dict.fromkeys(_OVERLAP_KEYS) if blocks else meter.overlap(case, issue, args.seconds)
        return _with_best(rows)

    def _able(self, name: str, group: Group, case: Case) -> bool:
        operation, args = case.calls[0]
        able = self._runtime.router.able(key_of(operation, group, args))
        backend = name.removeprefix(DIRECT)
        if name == AUTO:
            return bool(able)
        return backend in able if backend in self._runtime.ways else can_carry(name, case)

    def _row(self, name: str, group: Group, case: Case, us: list[float], wrong: int) -> dict[str, Any]:
        operation, args = case.calls[0]
        median = float(numpy.median(us))
        algbw = case.bytes / median / 1e3
        return {
            "operation": case.name,
            "bytes": case.bytes,
            "count": case.count,
            "dtype": self._args.dtype if case.dtype else "-",
            "redop": case.op or "-",
            "world_size": group.size,
            "mesh": str(group.mesh),
            "backend": name,
            "route": self._runtime.router.decide(key_of(operation, group, args)).backend if name == AUTO else name,
            "median_us": median,
            "mean_us": float(numpy.mean(us)),
            "p99_us": float(numpy.percentile(us, 99)),
            "min_us": min(us),
            "algbw_GBps": algbw,
            "busbw_GBps": algbw * case.operation.busbw_factor(group.size),
            "wrong": wrong,
            "samples": len(us),
        }


def _with_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the fastest carrier with its factor over the next one; "auto", which is one of the others, is left out."""
    ranked = sorted((row for row in rows if row["backend"] != AUTO), key=lambda row: row["median_us"])
    for row in rows:
        row["best"] = ""
    if len(ranked) > 1:
        ranked[0]["best"] = f"{ranked[1]['median_us'] / ranked[0]['median_us']:.2f}x"
    return rows


def _show(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    if args.omb:
        _print_omb(rows)
    else:
        _print_tables(rows)
        print("\n".join(summary(rows)))
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("run", "json", "csv", "plot")}
        write_json(args.json, "ops", [{k: v for k, v in row.items() if k != "best"} for row in rows], **settings)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        _plot(rows, args.plot)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences that compare "auto" with each single backend, and with the best one of each cell."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        cell = row["operation"], row["bytes"], row["mesh"]
        cells.setdefault(cell, {})[row["backend"]] = row["median_us"]
    sentences = []
    backends = dict.fromkeys(row["backend"] for row in rows if row["backend"] != AUTO)
    for name in backends:
        ratios = [medians[name] / medians[AUTO] for medians in cells.values() if {name, AUTO} <= medians.keys()]
        if ratios:
            mean = float(numpy.exp(numpy.mean(numpy.log(ratios))))
            sentences.append(f"auto against {name}: {mean:.2f} times as fast, geometric mean of {len(ratios)} cells")
    single = [name for name in backends if ":" not in name and name != MPI4PY]
    worst = {
        cell: medians[AUTO] / min(medians[name] for name in single if name in medians)
        for cell, medians in cells.items()
        if AUTO in medians and any(name in medians for name in single)
    }
    if worst:
        cell = max(worst, key=lambda cell: worst[cell])
        sentences.append(
            f"auto against the best single backend of each cell: at most {worst[cell]:.3f} times its time "
            f"({cell[0]} of {cell[1]} bytes), median {numpy.median(list(worst.values())):.3f}"
        )
    return sentences


def _verdict(rows: Sequence[dict[str, Any]], copy_peak: float) -> int:
    status = 0
    if not rows:
        print("mcrdl: error: none of the backends has any of the operations with this dtype", file=sys.stderr)
        status = 1
    for row in rows:
        what = f"{row['operation']} of {row['bytes']} bytes by {row['backend']}"
        if row["wrong"]:
            print(f"mcrdl: error: {what}: {row['wrong']} wrong results", file=sys.stderr)
            status = 1
        if row["busbw_GBps"] > copy_peak:
            print(
                f"mcrdl: error: {what}: {row['busbw_GBps']:.1f} GB/s is more than memory can be copied at here "
                f"({copy_peak:.1f} GB/s), so the call returned before it was done",
                file=sys.stderr,
            )
            status = 1
    return status


def _print_tables(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    least = _WIDTH + (_OVERLAP_WIDTH if rows and _OVERLAP_KEYS[0] in rows[0] else 0)
    console = Console(width=max(shutil.get_terminal_size().columns, least))  # cut figures are worth nothing
    for mesh in dict.fromkeys(row["mesh"] for row in rows):
        of_mesh = [row for row in rows if row["mesh"] == mesh]
        keys = [key for key in (*_KEYS, *_WIRE_KEYS, *_OVERLAP_KEYS) if any(key in row for row in of_mesh)]
        table = Table(title=f"{of_mesh[0]['world_size']} ranks, mesh {mesh} ({MESH_FORM})")
        for key in keys:
            table.add_column(
                _TITLES.get(key, key.replace("_us", " us")),
                justify="left" if isinstance(of_mesh[0].get(key), str) else "right",
            )
        formats = _KEYS | _WIRE_KEYS
        previous: tuple[Any, ...] = ()
        for row in of_mesh:
            cell = row["operation"], row["bytes"]
            if previous and cell != previous:
                table.add_section()
            previous = cell
            texts = ["-" if row.get(key) is None else formats.get(key, "{:.2f}".format)(row[key]) for key in keys]
            table.add_row(*texts, style="bold" if row["best"] else None)
        console.print(table)


def _print_omb(rows: Sequence[dict[str, Any]]) -> None:
    """Print OSU micro-benchmarks' columns, one table an operation and backend."""
    for name, backend in dict.fromkeys((row["operation"], row["backend"]) for row in rows):
        print(f"# {name} latency, by {backend}")
        print("# Size       Avg Latency(us)   Min Latency(us)   P99 Latency(us)  Samples")
        for row in rows:
            if (row["operation"], row["backend"]) == (name, backend):
                print(
                    f"{row['bytes']:<12} {row['mean_us']:>15.2f}   {row['min_us']:>15.2f}   {row['p99_us']:>15.2f}  "
                    f"{row['samples']:>7}"
                )
        print()


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sized = [row for row in rows if row["bytes"]]
    panels = list(dict.fromkeys((row["operation"], row["mesh"]) for row in sized))
    one_mesh = len({mesh for _, mesh in panels}) == 1
    ticks = sorted({row["bytes"] for row in sized})
    shown = ticks[:: -(-len(ticks) // 5)] if ticks else []
    across = min(4, len(panels)) or 1
    down = -(-len(panels) // across) or 1
    figure, axes = pyplot.subplots(down, across, figsize=(4 * across, 3 * down), layout="constrained", squeeze=False)
    backends = list(dict.fromkeys(row["backend"] for row in sized))
    for place, axis in enumerate(axes.flat):
        if place >= len(panels):
            axis.set_axis_off()
            continue
        name, mesh = panels[place]
        for number, backend in enumerate(backends):
            of_line = [row for row in sized if (row["operation"], row["mesh"], row["backend"]) == (name, mesh, backend)]
            if of_line:
                style = (
                    {"color": "black", "linestyle": ":", "zorder": 3} if backend == AUTO else {"color": f"C{number}"}
                )
                x, y = [row["bytes"] for row in of_line], [row["median_us"] for row in of_line]
                axis.plot(x, y, label=backend, marker=".", **style)
        axis.set(xscale="log", yscale="log", title=name if one_mesh else f"{name}, {mesh}", ylabel="us (median)")
        axis.set_xticks(shown, [size_text(size) for size in shown])
        axis.set_xticks([], minor=True)
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
