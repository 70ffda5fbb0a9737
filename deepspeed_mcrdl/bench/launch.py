"""Starts the ranks of a benchmark on this host: plain processes with the environment torch.distributed reads."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from deepspeed_mcrdl.machine import cores

_POLL_S = 0.05
GRACE_S = 5.0


def under_launcher() -> bool:
    """Return whether this process is a rank that somebody's launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def threads(ranks: int) -> str:
    """Return OMP_NUM_THREADS for each of `ranks` processes that share this machine's cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))


def rank_environment(rank: int, ranks: int, port: int, hosts: int = 1, address: str = "127.0.0.1") -> dict[str, str]:
    """Return what a rank needs in its environment, the threads of this machine's cores shared out.

    Args:
        rank: the rank.
        ranks: number of ranks, a multiple of `hosts`.
        port: where rank 0 serves the job's store.
        hosts: number of hosts, whose ranks follow one another; all of them are on this machine.
        address: of rank 0's host.
    """
    on_a_host = ranks // hosts
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % on_a_host),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(on_a_host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads(ranks),
    }


def run_ranks(arguments: Sequence[str], ranks: int, timeout_s: float) -> int:
    """Run ``mcrdl ARGUMENTS`` in `ranks` processes and return the first exit status that is not 0, else 0.

    The others are ended when one fails, and all after `timeout_s`.
    """
    port = free_port()
    command = [sys.executable, "-m", "deepspeed_mcrdl", *arguments]
    processes = [
        subprocess.Popen(command, env={**os.environ, **rank_environment(rank, ranks, port)}) for rank in range(ranks)
    ]
    try:
        return first_failure(processes, timeout_s)
    finally:
        end(processes)


def first_failure(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = math.inf) -> int:
    """Wait until one process has failed, and return its exit status, or until all have ended well, and return 0.

    After `timeout_s` it says so on stderr and returns 1.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in processes]
        failed = next((status for status in statuses if status), None)
        if failed is not None:
            return failed
        if None not in statuses:
            return 0
        if time.monotonic() > deadline:
            print(f"mcrdl: error: the ranks were not done within {timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(_POLL_S)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those processes that still run: SIGTERM, and SIGKILL after GRACE_S."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
