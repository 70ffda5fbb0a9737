"""Compressed all_reduce for each codec and size beside the same call uncompressed: predicted and measured time.

Times are medians of the slowest rank, the ways called in turns in one run. Wire bytes are what a rank sends to others,
computed from the payloads. The error is that of the result, as a part of the exact sum's norm, and its bound what the
codec promises of its two encodings; a result beyond its bound, element by element, or not the same on all ranks is
wrong. Data are normally distributed, and error feedback starts anew in each call. The plan is what "mode": "plan" does.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.cases import Case, Issue
from deepspeed_mcrdl.bench.job import add_ranks_option, job, starts_ranks
from deepspeed_mcrdl.bench.measure import Meter
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.config import Compression
from deepspeed_mcrdl.errors import ConfigError, suggest
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.runtime import Runtime, key_of
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.transforms.compression.codec import Codec, installed
from deepspeed_mcrdl.transforms.compression.compressed import partitioned
from deepspeed_mcrdl.transforms.compression.plan import MARGIN, Plan, choose
from deepspeed_mcrdl.transforms.compression.policy import Policy, codec_of
from deepspeed_mcrdl.work import Pending

_PLAIN = "none"
_TIMEOUT_S = 1800.0
_SUM_ROUNDING = 2.0**-22  # of the magnitudes that are summed up: float32, in another order than torch's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench compression`."""
    add_ranks_option(parser)
    parser.add_argument("--codecs", type=options.names, default=["all"], help="comma-separated codecs (default: all)")
    parser.add_argument("--sizes", type=options.sizes, default="64K,1M,4M", help="bytes: 256,64K or 256:16M")
    parser.add_argument("--backend", default="auto", help="what carries the calls (default: auto, as in a job)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each codec and size (default: 1)")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if every checked result was right."""
    known = installed()
    names = list(known) if args.codecs == ["all"] else args.codecs
    for name in names:
        if name not in known:
            raise ConfigError(f'unknown codec "{name}".{suggest(name, known)}')
        codec_of(Compression(codec=name))  # what it needs is an error before the ranks start
    status = starts_ranks(args, _TIMEOUT_S)
    if status is not None:
        return status
    with job({}) as runtime:
        rows = [row for name in names for row in _rows(runtime, name, args)]
        if runtime.rank == 0:
            _print(rows, runtime.world_size)
            if args.json:
                write_json(args.json, "compression", rows, seconds=args.seconds)
            for row in rows:
                if row["wrong"]:
                    what = f"{row['bytes']} bytes by {row['codec']}"
                    print(f"mcrdl: error: {what}: {row['wrong']} wrong results", file=sys.stderr)
    return 1 if any(row["wrong"] for row in rows) else 0


def _rows(runtime: Runtime, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one codec; every rank has the same."""
    world = runtime.groups.world
    config = Compression(codec=name, groups=("world",))
    policy = Policy(config, runtime.ways, runtime.groups, runtime.progress, runtime.join, runtime.fitted)
    try:
        return [_row(runtime, world, policy, name, size, args) for size in args.sizes]
    finally:
        for part in policy.leave(world):
            for way in runtime.ways.values():
                way.leave(part)
        policy.close()


def _row(
    runtime: Runtime, group: Group, policy: Policy, name: str, size: int, args: argparse.Namespace
) -> dict[str, Any]:
    compressed = policy.compressed
    codec = compressed.codec
    inputs = [torch.randn(size // 4, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
    tensor = torch.empty_like(inputs[0])
    call = (tensor, "sum")
    key = key_of(ops.ALL_REDUCE, group, call)
    backend = runtime.ways[runtime.router.decide(key, args.backend).backend]
    figures = policy.figures(backend, ops.ALL_REDUCE, group, torch.float32, tensor.device)
    plan = choose(*figures, nbytes=size, ranks=group.size, reduces=True)
    carrier = runtime.ways[plan.carrier]
    compressed.prepare(carrier, group, tensor.device)
    compressed.identities.discard(group)  # the sizes are others now
    pieces = [torch.split(tensor, -(-tensor.numel() // plan.partitions)) for tensor in inputs]
    exact, bound = (
        torch.cat(parts) for parts in zip(*(bounds(codec, piece) for piece in zip(*pieces, strict=True)), strict=True)
    )
    rounding = _SUM_ROUNDING * torch.stack(inputs).double().abs().sum(0)
    worst_error = 0.0

    def prepare() -> None:
        tensor.copy_(inputs[group.rank])
        compressed.reset()
        compressed.identities.end_step()

    def right() -> bool:
        nonlocal worst_error
        off = (tensor.double() - exact).abs()
        worst_error = max(worst_error, float(off.norm() / exact.norm()))
        return bool((off <= bound + rounding).all())

    meter = Meter(runtime, group)
    case = Case(
        name=ops.ALL_REDUCE.name,
        operation=ops.ALL_REDUCE,
        bytes=size,
        count=tensor.numel(),
        dtype=torch.float32,
        op="sum",
        calls=((ops.ALL_REDUCE, call),),
        prepare=prepare,
        right=right,
    )
    plain = _issue(runtime, group, backend, runtime.fitted(backend, ops.ALL_REDUCE, group, call))
    coded = _issue(runtime, group, carrier, partial(compressed.all_reduce, carrier, plan.partitions))
    # The errors of a plain call are within any bound.
    samples = meter.measure(case, {_PLAIN: plain, name: coded}, args.seconds)
    us = {way: float(numpy.median(times)) for way, times in samples.us.items()}
    wrong = sum(samples.wrong.values())
    prepare()
    coded(ops.ALL_REDUCE, call)
    wrong += not right() or not _same(meter, tensor)
    return {
        "codec": name,
        "bytes": size,
        "backend": carrier.name,
        "partitions": plan.partitions,
        "predicted_us": plan.us,
        "measured_us": us[name],
        "plain_backend": backend.name,
        "plain_predicted_us": plan.plain_us,
        "plain_us": us[_PLAIN],
        "ratio": us[_PLAIN] / us[name],
        "plan": _decision(plan, us[name], us[_PLAIN]),
        "wire_bytes": _wire_bytes(codec, inputs, group.rank),
        "plain_wire_bytes": int(ops.ALL_REDUCE.busbw_factor(group.size) * size),
        "error": meter.worst([worst_error])[0],
        "bound": float(bound.norm() / exact.norm()),
        "wrong": int(meter.worst([float(wrong)])[0]),
    }


def _decision(plan: Plan, us: float, plain_us: float) -> str:
    """Return what a job does: it compresses what is predicted and then measured to be faster."""
    if not plan.compress:
        return "off"
    return "on" if us < MARGIN * plain_us else "off, measured"


def bounds(codec: Codec, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact sum of all ranks' tensors and the bound of each element's error, besides float32's rounding.

    The owner of a partition sees the other ranks' payloads of it and encodes the sum. For a codec that draws numbers
    the bound of the second encoding is that of the largest sum possible.
    """
    exact, bound = [], []
    for owner, parts in enumerate(zip(*(partitioned(tensor, len(inputs)) for tensor in inputs), strict=True)):
        first = torch.stack([codec.bound(part) for rank, part in enumerate(parts) if rank != owner]).sum(0)
        total = torch.stack([part.double() for part in parts]).sum(0)
        if codec.stochastic:
            seen = total.abs() + first
        else:
            seen = torch.stack(
                [
                    part.double()
                    if rank == owner
                    else codec.decode(codec.encode(part), part.numel(), part.dtype).double()
                    for rank, part in enumerate(parts)
                ]
            ).sum(0)
        exact.append(total)
        bound.append(first + codec.bound(seen))
    return torch.cat(exact), torch.cat(bound)


def _issue(runtime: Runtime, group: Group, backend: Backend, method: Callable[..., Pending]) -> Issue:
    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> None:
        pending = method(group, *args)
        runtime.progress.finish(pending.poll, pending, Call(operation, group, backend.name, group.calls))

    return issue


def _same(meter: Meter, tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same bits."""
    mark = float(zlib.crc32(tensor.numpy().tobytes()))
    highest, lowest = meter.worst([mark, -mark])
    return highest == -lowest


def _wire_bytes(codec: Codec, inputs: Sequence[torch.Tensor], rank: int) -> int:
    """Return what a rank sends: payloads to the owners, and its sum's payload to all others."""
    generator = torch.Generator().manual_seed(0)
    sizes = [
        codec.encode(part, generator).numel()
        for place, part in enumerate(partitioned(inputs[rank], len(inputs)))
        if place != rank
    ]
    own = torch.stack([partitioned(tensor, len(inputs))[rank] for tensor in inputs]).sum(0)
    return sum(sizes) + (len(inputs) - 1) * codec.encode(own, generator).numel()


def _print(rows: Sequence[dict[str, Any]], ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"all_reduce of float32 on {ranks} ranks, microseconds; ratio: uncompressed / compressed")
    titles = ("codec", "bytes", "by", "parts", "predicted", "measured", "none by", "predicted", "measured", "ratio")
    for title in (*titles, "plan", "wire bytes", "of", "error", "bound", "#wrong"):
        table.add_column(title, justify="left" if title in ("codec", "by", "none by", "plan") else "right")
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("codec", "bytes", "backend", "partitions")),
            *(f"{row[key]:.0f}" for key in ("predicted_us", "measured_us")),
            row["plain_backend"],
            *(f"{row[key]:.0f}" for key in ("plain_predicted_us", "plain_us")),
            f"{row['ratio']:.2f}",
            row["plan"],
            *(str(row[key]) for key in ("wire_bytes", "plain_wire_bytes")),
            *(f"{row[key]:.2g}" for key in ("error", "bound")),
            str(row["wrong"]),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
