"""Starts the ranks of a benchmark on this host: plain processes with the environment torch.distributed reads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from deepspeed_mcrdl.machine import cores

_POLL_S = 0.05
_GRACE_S = 5.0


def under_launcher() -> bool:
    """Return whether this process is a rank that somebody's launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what a rank on this host needs in its environment, the threads of the cores shared out."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks))),
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
    deadline = time.monotonic() + timeout_s
    try:
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
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
