"""A benchmark as a job of several ranks: its start, its end, and the groups that it measures on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.launch import run_ranks, under_launcher
from deepspeed_mcrdl.bootstrap.launcher import started_by_mpi
from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.faces import api
from deepspeed_mcrdl.groups import Group, Mesh, mesh_of
from deepspeed_mcrdl.runtime import Runtime, current

WORLD = "world"
ALL = "all"
MESH_FORM = "nodes x ranks per node / stride"


def add_ranks_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--ranks`."""
    parser.add_argument(
        "--ranks", type=options.at_least(1), help="start this many ranks here (default: run under your launcher)"
    )


def add_meshes_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare `--meshes`."""
    parser.add_argument(
        "--meshes", default=default, help=f'"world", "all", or such as 1x2/1: {MESH_FORM} (default: {default})'
    )


def in_a_rank() -> bool:
    """Return whether this process is a rank that some launcher, or this command, has started."""
    return under_launcher() or started_by_mpi()


def starts_ranks(args: argparse.Namespace, timeout_s: float, more: Sequence[str] = ()) -> int | None:
    """Start the ranks of this command, with `more` options, and return its exit status; None in a rank.

    Raises:
        ConfigError: if there is neither `--ranks` nor a launcher.
    """
    if in_a_rank():
        return None
    if args.ranks is None:
        raise ConfigError("give --ranks N, or start under deepspeed, torchrun or mpirun")
    return run_ranks([*sys.argv[1:], *more], args.ranks, timeout_s)


@contextmanager
def job(config: Mapping[str, Any]) -> Iterator[Runtime]:
    """Start communication with an "mcrdl" block, and end it.

    Raises:
        ConfigError: if there is one rank only.
    """
    api.init(config={"banner": False, **config})
    runtime = current()
    assert runtime is not None
    try:
        if runtime.world_size < 2:
            raise ConfigError("one rank has nobody to communicate with: give --ranks 2 or more")
        yield runtime
    finally:
        api.finalize()


def meshes_of(hosts: Sequence[str]) -> dict[Mesh, list[list[int]]]:
    """Return how a job can be cut into equal groups of ranks at one distance: mesh -> the groups' ranks.

    These are the groups that data, tensor, pipeline and expert parallelism make. The world comes first.
    """
    world = len(hosts)
    found: dict[Mesh, list[list[int]]] = {}
    sizes = [size for size in range(world, 1, -1) if world % size == 0]
    for size in sizes:
        for stride in [stride for stride in range(1, world + 1) if world % (size * stride) == 0]:
            groups = [
                [block + offset + stride * place for place in range(size)]
                for block in range(0, world, size * stride)
                for offset in range(stride)
            ]
            if len({mesh_of(ranks, hosts) for ranks in groups}) == 1:
                found.setdefault(mesh_of(groups[0], hosts), groups)
    return found


def measured_groups(runtime: Runtime, meshes: str) -> list[Group]:
    """Return this rank's group of each mesh asked for; every rank makes them in the same order.

    Args:
        runtime: the runtime of the job.
        meshes: "world", "all", or comma-separated meshes such as "1x2/1".

    Raises:
        ConfigError: on a mesh that this job doesn't have.
    """
    possible = meshes_of(runtime.groups.hosts)
    by_name = {str(mesh): mesh for mesh in possible}
    world = next(iter(possible))
    if meshes == WORLD:
        wanted = [world]
    elif meshes == ALL:
        wanted = list(possible)
    else:
        for name in meshes.split(","):
            if name not in by_name:
                raise ConfigError(
                    f'this job has no mesh "{name}" (nodes x ranks per node / stride): {", ".join(by_name)}'
                )
        wanted = [by_name[name] for name in meshes.split(",")]
    groups = []
    for mesh in wanted:
        if mesh == world:
            groups.append(runtime.groups.world)
            continue
        made = [(ranks, runtime.new_group(ranks)) for ranks in possible[mesh]]
        mine = next(torch_group for ranks, torch_group in made if runtime.rank in ranks)
        groups.append(runtime.groups.of(mine))
    return groups
