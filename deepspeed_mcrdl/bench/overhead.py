"""What routing adds to a call: the same call through deepspeed.comm's backend object and made directly on the backend.

Beside them the library's own interface, as a script would call it without the plugin: torch.distributed for gloo,
mpi4py's blocking buffer interface for MPI. All are called in turns in one run; figures are medians of the slowest rank
in microseconds, and each result is checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy
import torch

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.carriers import DIRECT, MPI4PY, TORCH, by_torch, can_carry, carrier
from deepspeed_mcrdl.bench.cases import Case, make_case
from deepspeed_mcrdl.bench.job import add_ranks_option, starts_ranks
from deepspeed_mcrdl.bench.measure import Meter, reaching
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import ConfigError

_OPERATIONS = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_to_all_single")
_LIBRARIES = {"gloo": TORCH, "mpi": MPI4PY}
_ROUTED = "routed"
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench overhead`."""
    add_ranks_option(parser)
    parser.add_argument("--backends", type=options.names, default=["auto"], help="comma-separated; auto: all usable")
    parser.add_argument("--sizes", type=options.sizes, default="256,64K,1M", help="bytes: 256,64K,1M or 256:16M")
    parser.add_argument("--iterations", type=options.at_least(1), default=300, help="rounds of calls of each kind")
    parser.add_argument("--checked", action="store_true", help="what the ranks' comparing of calls adds, too")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    status = starts_ranks(args, _TIMEOUT_S)
    if status is not None:
        return status
    import deepspeed
    from deepspeed.comm import comm

    os.environ.setdefault("MCRDL_LOG_LEVEL", "WARNING")  # the block of every start would stand above the figures
    deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    face = comm.cdb
    torch_gloo = torch.distributed.new_group(backend="gloo")
    usable = reaching(face.runtime, face.runtime.groups.world)
    names = usable if args.backends == ["auto"] else args.backends
    for name in names:
        if name not in usable:
            raise ConfigError(f'the backend "{name}" is not usable here, but {", ".join(usable)}')
    rows = []
    for name in names:
        face.restart(parse({"routing": {"default": name}, "checked": args.checked, "banner": False}))
        for size in args.sizes:
            for operation in _OPERATIONS:
                case = make_case(operation, face.runtime.groups.world, size)
                rows.append(_measure(face, name, case, torch_gloo, args.iterations))
    if face.get_rank() == 0:
        _print(rows)
        if args.json:
            shown = [{key: value for key, value in row.items() if key != "wrong"} for row in rows]
            write_json(args.json, "overhead", shown, iterations=args.iterations, checked=args.checked)
    face.destroy_process_group()
    for row in rows:
        if row["wrong"] and face.get_rank() == 0:
            print(f"mcrdl: error: {row['operation']} by {row['backend']}: wrong results", file=sys.stderr)
    return 0 if all(row["wrong"] == 0 for row in rows) else 1


def _measure(face: Any, name: str, case: Case, torch_gloo: Any, iterations: int) -> dict[str, Any]:
    runtime = face.runtime
    world = runtime.groups.world
    carriers = {DIRECT: carrier(DIRECT + name, runtime, world), _ROUTED: by_torch(face, None)}
    library = _LIBRARIES.get(name)
    if library is not None and can_carry(library, case):
        carriers[library] = carrier(library, runtime, world, torch_gloo)
    samples = Meter(runtime, world).measure(case, carriers, 0, iterations)
    medians = {way: float(numpy.median(us)) for way, us in samples.us.items()}
    direct, routed = medians[DIRECT], medians[_ROUTED]
    return {
        "operation": case.name,
        "bytes": case.bytes,
        "backend": name,
        "direct_us": direct,
        "routed_us": routed,
        "extra_us": routed - direct,
        "ratio": routed / direct,
        "library": library,
        "library_us": medians.get(library or ""),
        "wrong": sum(samples.wrong.values()),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="routed call against the same call made on the backend (median of the slowest rank)")
    for title in (
        "operation",
        "bytes",
        "backend",
        "direct us",
        "routed us",
        "extra us",
        "ratio",
        "library us",
        "#wrong",
    ):
        table.add_column(title, justify="left" if title in ("operation", "backend") else "right")
    for row in rows:
        table.add_row(
            row["operation"],
            str(row["bytes"]),
            row["backend"],
            *(f"{row[key]:.1f}" for key in ("direct_us", "routed_us", "extra_us")),
            f"{row['ratio']:.3f}",
            "-" if row["library_us"] is None else f"{row['library_us']:.1f} ({row['library']})",
            str(row["wrong"]),
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
