"""An MPI world in real processes, under each launcher; how it ends; and what is said where none can be had."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed_mcrdl.bench.launch import free_port, rank_environment
from deepspeed_mcrdl.bootstrap import library, mpi

ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
TIMEOUT_S = 50

pytestmark = pytest.mark.skipif(library.load().is_open_mpi, reason="needs MPICH or Intel MPI")

# What every rank runs first. Under mpirun the ranks of torch are MPI's, or those in reverse.
PRELUDE = """
import datetime, functools, json, os, signal, sys, threading, time
if "RANK" not in os.environ:
    mpi_rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    rank = size - 1 - mpi_rank if os.environ.get("REVERSED") else mpi_rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
import torch.distributed as dist
from deepspeed_mcrdl.bootstrap import mpi
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
@functools.cache
def store():
    return next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=30)))[0]
def report(**values):
    with open(os.path.join(os.environ["REPORTS"], f"{rank}.json"), "w") as file:
        json.dump(values, file)
def start(hosts=None):
    return mpi.start(store(), rank, world_size, hosts or ["here"] * world_size)
"""


class Job:
    """Starts ranks that run a piece of code, and reads what each has reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, code: str, world_size: int, launcher: str = "plain", **env: str) -> tuple[list[int], list[Any]]:
        """Return the exit statuses and, by rank, what was reported."""
        script = self._folder / "rank.py"
        script.write_text(PRELUDE + code)
        port = free_port()
        common = {**os.environ, "PYTHONPATH": str(ROOT), "REPORTS": str(self._folder), "OMP_NUM_THREADS": "1", **env}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        python = [sys.executable, str(script)]
        if launcher == "plain":
            starts = [(python, {**common, **rank_environment(rank, world_size, port)}) for rank in range(world_size)]
        elif launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", f"--master-port={port}"]
            starts = [([sys.executable, *torchrun, str(script)], common)]
        else:
            reverse = {"REVERSED": "1"} if launcher == "reversed mpirun" else {}
            starts = [([str(MPIEXEC), "-n", str(world_size), *python], {**common, **reverse})]
        # A folder of nobody's: the ranks may be started anywhere.
        processes = [subprocess.Popen(command, env=env, cwd="/") for command, env in starts]
        statuses = _wait(processes)
        reports = [self._folder / f"{rank}.json" for rank in range(world_size)]
        return statuses, [json.loads(report.read_text()) if report.exists() else None for report in reports]


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    deadline = time.monotonic() + TIMEOUT_S
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Any:
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 5  # another job on this machine may be starting: its files go within a second
    while (left := {name for name in os.listdir("/dev/shm") if "mpi" in name.lower()} - before) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not left


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [
        ("plain", 2),
        ("plain", 4),
        ("torchrun", 2),
        ("torchrun", 4),
        ("mpirun", 2),
        ("reversed mpirun", 4),
    ],
)
def test_a_world_in_torch_order(job: Job, launcher: str, world_size: int) -> None:
    if "mpirun" in launcher and not MPIEXEC.exists():
        pytest.skip("no mpiexec beside this Python")
    code = """
usable_before, described_before, started_before = mpi.usable(), mpi.describe(), mpi.started_by()
before = dict(os.environ)
comm = start()
from mpi4py import MPI
again = start()
report(rank=comm.rank, size=comm.size, sum=comm.allreduce(1 << rank), again=again.allreduce(rank),
       described=[described_before, mpi.describe()], started_by=[started_before, mpi.started_by()],
       usable=[usable_before, mpi.usable()],
       same_environment=before == dict(os.environ), any_thread=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
       own=MPI.Comm.Compare(comm, MPI.COMM_WORLD) != MPI.IDENT)
if world_size == 4:  # else the exit of the process does it
    mpi.stop()
    mpi.stop()
"""
    statuses, reports = job.run(code, world_size, launcher)
    assert set(statuses) == {0}
    name = library.load().name
    for rank, report in enumerate(reports):
        assert report == {
            "rank": rank,
            "size": world_size,
            "sum": 2**world_size - 1,
            "again": sum(range(world_size)),
            "described": [name, name],
            "started_by": ["", "mpirun" if "mpirun" in launcher else "mcrdl"],
            "usable": [None, None],
            "same_environment": True,
            "any_thread": True,
            "own": True,
        }


def test_two_hosts(job: Job) -> None:
    code = """
comm = start(["a", "b"])
from mpi4py import MPI
report(on_my_host=comm.Split_type(MPI.COMM_TYPE_SHARED).size, sum=comm.allreduce(rank))
"""
    statuses, reports = job.run(code, 2)
    assert statuses == [0, 0]
    assert reports == [{"on_my_host": 1, "sum": 1}] * 2


def test_many_starts(job: Job) -> None:
    code = """
failures = 0
for attempt in range(20):
    child = os.fork()  # a process of its own that has torch imported already
    if child == 0:
        store = dist.FileStore(os.path.join(os.environ["REPORTS"], f"store-{attempt}"), world_size)
        comm = mpi.start(store, rank, world_size, ["here"] * world_size)
        right = comm.allreduce(rank) == 1
        mpi.stop()
        os._exit(0 if right else 3)  # torch alone would take a second to leave
    failures += os.waitpid(child, 0)[1] != 0
report(failures=failures)
"""
    statuses, reports = job.run(code, 2)
    assert statuses == [0, 0]
    assert reports == [{"failures": 0}] * 2


def test_a_killed_rank_does_not_hold_up_stop(job: Job) -> None:
    code = """
start().Barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
mpi.stop()
report(seconds=time.monotonic() - began)
"""
    statuses, reports = job.run(code, 2)
    assert statuses == [0, -signal.SIGKILL]
    assert reports[0]["seconds"] < 3


def test_a_rank_that_raises_while_another_thread_hangs_in_mpi_ends(job: Job) -> None:
    code = """
comm = start()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=comm.Barrier, daemon=True).start()
time.sleep(0.2)
sys.exit(7)
"""
    assert job.run(code, 2)[0] == [7, -signal.SIGKILL]


def test_the_exit_of_a_forked_child_leaves_mpi_alone(job: Job) -> None:
    code = """
comm = start()
child = os.fork()
if child == 0:
    sys.exit(0)
status = os.waitpid(child, 0)[1]
report(child=status, sum=comm.allreduce(1))
"""
    statuses, reports = job.run(code, 2)
    assert statuses == [0, 0]
    assert reports == [{"child": 0, "sum": 2}] * 2


def test_mpi4py_imported_first(job: Job) -> None:
    code = """
if rank == 0:
    from mpi4py import MPI
usable = mpi.usable()
try:
    start()
except mpi.BootstrapError as error:
    report(usable=usable, error=str(error))
store().set(f"done/{rank}", "")
store().wait([f"done/{r}" for r in range(world_size)])
"""
    statuses, reports = job.run(code, 2)
    assert statuses == [0, 0]
    assert "imported mpi4py.MPI before the plugin" in reports[0]["usable"]
    assert reports[1]["usable"] is None
    for report in reports:
        assert "on rank 0" in report["error"]
        assert "mpi4py.rc.initialize = False" in report["error"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("store(); time.sleep(4); sys.exit(0)", "rank 1 did not come"),
        ("Library.initialize = lambda self: os.kill(os.getpid(), signal.SIGKILL)", "another rank may have died"),
        ("Library.initialize = lambda self: self.no_such_thing", "rank 1: "),
    ],
    ids=["never comes", "dies in MPI_Init", "raises in MPI_Init"],
)
def test_a_rank_that_fails_makes_the_others_raise(job: Job, failure: str, message: str) -> None:
    code = f"""
from deepspeed_mcrdl.bootstrap.library import Library
mpi.START_TIMEOUT_S = 2
if rank == 1:
    {failure}
try:
    start()
except mpi.BootstrapError as error:
    report(error=str(error))
"""
    statuses, reports = job.run(code, 2)
    assert statuses[0] == 0
    assert message in reports[0]["error"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'mpi4py'"), "pip install mpi4py mpich"),
        (RuntimeError("cannot load MPI library\nlibmpi.so: no such file"), "MPI4PY_LIBMPI"),
    ],
)
def test_why_mpi_is_not_usable(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def find_spec(name: str) -> None:
        raise error

    library.load.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    reason = mpi.usable()
    assert reason is not None
    assert message in reason


def test_usable_initialises_nothing() -> None:
    assert mpi.usable() is None
    assert not library.load().initialized
