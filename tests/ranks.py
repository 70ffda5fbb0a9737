"""Real ranks for tests: processes that stay up, with the plugin as DeepSpeed's backend, and run functions on demand.

A function given to `Ranks.run` is a top-level function of a test module; it runs on every rank at once and finds
DeepSpeed's communication started. An assertion that fails on any rank fails the test, with the rank in its text.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from deepspeed_mcrdl.bench.launch import free_port, rank_environment

START_TIMEOUT_S = 120
_AFTER_AN_ERROR_S = 10


class Ranks:
    """`world_size` processes that run functions together.

    Args:
        world_size: number of processes.
        hosts: what each rank takes its host's name to be; empty: this machine's.
    """

    def __init__(self, world_size: int, hosts: Sequence[str] = ()) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            environment = rank_environment(rank, world_size, port)
            host = hosts[rank] if hosts else None
            process = context.Process(target=_work, args=(theirs, environment, host), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect(START_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
        """Run ``function(*args)`` on every rank and return the results in rank order."""
        for connection in self._connections:
            connection.send((function, args))
        return self._collect(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the processes can take another function."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            if not connection.closed:
                connection.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = set(range(self.world_size))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if not self._connections[rank].poll(0.005):
                    continue
                waiting.discard(rank)
                try:
                    error, result = self._connections[rank].recv()
                except EOFError:
                    error, result = f"the process ended with status {self._processes[rank].exitcode}", None
                if error is None:
                    results[rank] = result
                else:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR_S)
        if waiting:
            for rank in waiting:
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)  # the stack goes to stderr
            time.sleep(0.5)
            for process in self._processes:
                process.kill()
            self.close()
        if errors or waiting:
            told = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
            told += [f"rank {rank}: did not return within {timeout_s} s" for rank in sorted(waiting)]
            raise AssertionError("\n".join(told))
        return [results[rank] for rank in range(self.world_size)]


def _work(connection: Connection, environment: dict[str, str], host: str | None) -> None:
    os.environ.update(environment, DS_ACCELERATOR="cpu", MCRDL_LOG_LEVEL="ERROR")
    if host is not None:
        socket.gethostname = lambda: host
        os.environ.update(UCX_NET_DEVICES="lo", FI_TCP_IFACE="lo", GLOO_SOCKET_IFNAME="lo")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        import deepspeed

        deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
        connection.send((None, None))
    except BaseException:
        connection.send((traceback.format_exc(), None))
        return
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((None, function(*args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
    deepspeed.comm.destroy_process_group()
    sys.stdout.flush()
