"""An MPI communicator of exactly this job's ranks, in torch's rank order, whatever launcher started the processes.

A world that is there already is used: MPI initialised before, or an MPI launcher's. Elsewhere `pmi` serves one from the
job's store. Where none can be had every rank raises BootstrapError, within START_TIMEOUT_S.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepspeed_mcrdl.bootstrap.launcher import environment, find_launcher
from deepspeed_mcrdl.bootstrap.library import Library, load, mpi_thread
from deepspeed_mcrdl.bootstrap.pmi import BootstrapError, Meeting, Responder
from deepspeed_mcrdl.bootstrap.settings import settings
from deepspeed_mcrdl.machine import cores

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store

__all__ = ["START_TIMEOUT_S", "BootstrapError", "describe", "start", "stop", "usable"]

START_TIMEOUT_S = 60.0
_PEERS_TIMEOUT_S = 1.5
_FINALIZE_TIMEOUT_S = 2.0
_INITIALIZED = "initialized"
_OURS = "mcrdl"

_T = TypeVar("_T")
_starts = itertools.count()
_world: _World | None = None


def usable() -> str | None:
    """Return None, or in one sentence why MPI can't be had in this process; never initialises MPI."""
    try:
        library = load()
    except BootstrapError as error:
        return str(error)
    if library.is_open_mpi and not library.initialized and find_launcher(open_mpi=True) is None:
        return _needs_a_launcher(library.name)
    return _trouble(library, _job_size())


def describe() -> str:
    """Return the MPI library with its version."""
    return load().name


def started_by() -> str:
    """Return who started the MPI world of this process; empty if this module did not."""
    return "" if _world is None else _world.started_by


def start(store: Store, rank: int, world_size: int, hosts: Sequence[str]) -> MPI.Intracomm:
    """Return a new communicator of all ranks, in torch's order. Every rank calls it.

    Args:
        store: the job's store.
        rank: torch's rank.
        world_size: number of ranks.
        hosts: host name of each rank.

    Raises:
        BootstrapError: on every rank, if MPI can't be had on one.
    """
    global _world
    meeting = Meeting(store, f"mcrdl/mpi/{next(_starts)}", rank, world_size, START_TIMEOUT_S)
    try:
        offers = meeting.exchange("MPI's start", _offer(world_size))
        source = _choose_source(offers, world_size)
        if source != _INITIALIZED:
            responder = Responder(meeting, offers[0]["kvs"], hosts) if source == _OURS else None
            _initialize(meeting, responder, source, hosts)
            _world = _World(source, responder, os.getpid())
            atexit.register(stop)
        meeting.exchange("MPI's first communicator", None)
        comm = _in_time(lambda: _split_world(rank), "MPI_Comm_split", meeting)
        if _world is not None and source != _INITIALIZED:
            _world.farewell_comm = _in_time(comm.Dup, "MPI_Comm_dup", meeting)
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # a store that is gone tells the others by itself
            meeting.fail(f"rank {rank}: {error}")
        if isinstance(error, BootstrapError):
            raise
        raise BootstrapError(f"MPI's start-up failed on rank {rank}: {error}") from error
    finally:
        _unlink_shared_memory()
    return comm


def stop() -> None:
    """End MPI if `start` began it; dead peers cost ~2 s. Idempotent, and run at exit."""
    global _world
    world, _world = _world, None
    if world is not None and world.pid == os.getpid():  # a forked child has no part in it
        world.end()


def give_up_peers() -> None:
    """Don't wait for the others at the end: they have just been waited for in vain."""
    if _world is not None:
        _world.given_up = True


@dataclass
class _World:
    """The MPI world that `start` began, and how it ends."""

    started_by: str
    responder: Responder | None
    pid: int
    farewell_comm: MPI.Comm | None = None
    given_up: bool = False

    def end(self) -> None:
        library = load()
        if not library.finalized:
            # Without the peers Finalize would wait for them, or crash under a thread that still does.
            if not self._peers_have_come():
                return
            with contextlib.suppress(concurrent.futures.TimeoutError):
                mpi_thread().call(library.finalize).result(_FINALIZE_TIMEOUT_S)
        if self.responder is not None:
            self.responder.farewell()

    def _peers_have_come(self) -> bool:
        if self.farewell_comm is None:
            return False
        from mpi4py import MPI

        # An MPI launcher ends the job itself when a rank dies, and kills the late ones when one leaves before them.
        patient = self.responder is None and not hasattr(sys, "last_value")
        if self.given_up and not patient:
            return False
        deadline = time.monotonic() + _PEERS_TIMEOUT_S
        try:
            request = self.farewell_comm.Ibarrier()
            while not request.Test():
                if not patient and time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except MPI.Exception:
            return False
        return True


def _offer(world_size: int) -> dict[str, Any]:
    """Return what this rank brings, for the ranks to choose alike."""
    try:
        library = load()
    except BootstrapError as error:
        return {"trouble": str(error)}
    return {
        "trouble": _trouble(library, world_size),
        "library": library.name,
        "open_mpi": library.is_open_mpi,
        "world_rank": _initialized_world()[0] if library.initialized and not library.finalized else None,
        "launcher": find_launcher(library.is_open_mpi),
        "kvs": f"mcrdl_{uuid.uuid4().hex}",
    }


def _choose_source(offers: list[dict[str, Any]], world_size: int) -> str:
    """Return where the world comes from, alike on every rank: _INITIALIZED, a launcher's name or _OURS."""
    for rank, offer in enumerate(offers):
        if offer["trouble"]:
            raise BootstrapError(f"MPI can't be had on rank {rank}: {offer['trouble']}")
        if offer["library"] != offers[0]["library"]:
            raise BootstrapError(
                f"rank 0 has {offers[0]['library']} and rank {rank} has {offer['library']}; install the same on all"
            )
    every_rank = set(range(world_size))
    initialized = [rank for rank, offer in enumerate(offers) if offer["world_rank"] is not None]
    if initialized:
        if {offer["world_rank"] for offer in offers} == every_rank:
            return _INITIALIZED
        raise BootstrapError(
            f"MPI is initialised already on ranks {initialized}, in another world than this job's; "
            "start it on all ranks with mpirun, or on none"
        )
    launchers = [offer["launcher"] for offer in offers if offer["launcher"]]
    # Ranks under torchrun under srun inherit what srun told torchrun: such a world is not this job's.
    if {rank for _, rank, _ in launchers} == every_rank and all(size in (world_size, None) for *_, size in launchers):
        return str(launchers[0][0])
    if offers[0]["open_mpi"]:
        raise BootstrapError(_needs_a_launcher(offers[0]["library"]))
    return _OURS


def _initialize(meeting: Meeting, responder: Responder | None, source: str, hosts: Sequence[str]) -> None:
    crowded = hosts.count(hosts[meeting.rank]) > cores()
    variables = settings(load().name, one_host=len(set(hosts)) == 1, crowded=crowded)
    if responder is not None:
        fd = responder.start()
        variables |= {"PMI_FD": str(fd), "PMI_RANK": str(meeting.rank), "PMI_SIZE": str(meeting.world_size)}
    with environment(variables, hide_launcher=responder is not None):
        _in_time(load().initialize, f"MPI_Init_thread of {load().name}", meeting, responder)
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        size = _initialized_world()[1]
    if size != meeting.world_size:
        raise BootstrapError(f"MPI, started by {source}, has {size} ranks where the job has {meeting.world_size}")


def _split_world(rank: int) -> MPI.Intracomm:
    from mpi4py import MPI

    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI.Intracomm(MPI.COMM_WORLD.Split(0, rank))


def _in_time(function: Callable[[], _T], name: str, meeting: Meeting, responder: Responder | None = None) -> _T:
    """Call an MPI function that needs all ranks; raise if this or another rank fails or is late."""
    call = mpi_thread().call(function)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not call.done():
        concurrent.futures.wait([call], timeout=0.2)
        if responder is not None and responder.error is not None:
            raise BootstrapError(f"{name} got no answer: {responder.error}")
        if not call.done():
            meeting.raise_if_failed()
            if time.monotonic() > deadline:
                raise BootstrapError(
                    f"{name} did not return within {START_TIMEOUT_S:g} s: another rank may have died; see its output"
                )
    return call.result()


def _trouble(library: Library, job_size: int | None) -> str | None:
    """Return why this process can't become a rank of a job of `job_size` ranks, as far as it can know alone."""
    if not library.initialized:
        return None
    if library.finalized:
        return "MPI was ended in this process and can't be started twice; use a new process"
    _, size, any_thread = _initialized_world()
    if size == 1 and job_size not in (1, None):
        return (
            f"MPI is initialised already, as a world of this process alone where the job has {job_size} ranks: "
            "something imported mpi4py.MPI before the plugin started MPI. Import it after deepspeed.init_distributed() "
            "or set mpi4py.rc.initialize = False before that import, or start the job with mpirun"
        )
    if job_size not in (size, None):
        return f"MPI is initialised already with {size} ranks where the job has {job_size}; start as many with mpirun"
    if not any_thread:
        return (
            "MPI is initialised already without MPI_THREAD_MULTIPLE, which autograd's threads need; "
            'leave mpi4py.rc.thread_level at "multiple" or let the plugin start MPI'
        )
    return None


def _initialized_world() -> tuple[int, int, bool]:
    """Return rank and size of MPI's world, and whether any thread may call MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _job_size() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else None


def _needs_a_launcher(library: str) -> str:
    return f"{library} can be started by mpirun or srun only; start the job so, or `pip install mpich`"


def _unlink_shared_memory() -> None:
    """Remove the names of MPI's shared memory once all have mapped it: nothing stays behind if the job is killed."""
    maps = Path("/proc/self/maps")
    for path in set(re.findall(r"/dev/shm/(?:mpich|Intel_MPI)_\w+", maps.read_text())) if maps.exists() else ():
        with contextlib.suppress(OSError):  # another rank of this host was faster
            os.unlink(path)
