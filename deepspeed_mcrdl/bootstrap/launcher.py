"""What an MPI launcher has told this process through its environment, and how to hide that for a while."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping

_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "I_MPI_PMI", "MPIR_CVAR_PMI")


def find_launcher(open_mpi: bool) -> tuple[str, int, int | None] | None:
    """Return name, rank and size, if known, of the MPI launcher whose world this process could join.

    Args:
        open_mpi: whether the process uses Open MPI, which asks other launchers than MPICH and its relatives do.
    """
    env = os.environ
    if open_mpi:
        rank, size = env.get("OMPI_COMM_WORLD_RANK", env.get("PMIX_RANK", "")), env.get("OMPI_COMM_WORLD_SIZE", "")
    elif _is_open_socket(env.get("PMI_FD", "")) or "PMI_PORT" in env:
        rank, size = env.get("PMI_RANK", env.get("PMI_ID", "")), env.get("PMI_SIZE", "")
    else:
        return None
    if not rank.isdecimal():
        return None
    under_srun = "SLURM_STEP_ID" in env and "MPI_LOCALNRANKS" not in env and "OMPI_COMM_WORLD_RANK" not in env
    return "srun" if under_srun else "mpirun", int(rank), int(size) if size.isdecimal() else None


def started_by_mpi() -> bool:
    """Return whether an MPI launcher, such as mpirun, has started this process."""
    return any(find_launcher(open_mpi) is not None for open_mpi in (False, True))


@contextlib.contextmanager
def environment(changes: Mapping[str, str], hide_launcher: bool) -> Iterator[None]:
    """Set variables and, if asked to, hide an MPI launcher's; afterwards all are as before."""
    hidden = _PREFIXES if hide_launcher else ()
    before = {name: value for name, value in os.environ.items() if name in changes or name.startswith(hidden)}
    for name in before:
        del os.environ[name]
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update(before)


def _is_open_socket(fd: str) -> bool:
    # A launcher's variables outlive its connection in the children of the process that it started.
    try:
        return stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
    except (ValueError, OverflowError, OSError):
        return False
