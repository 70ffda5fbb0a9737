"""One time for all ranks: how far each host's clock is from that of rank 0's host.

Times are those of the clock that no adjustment of the date sets back. The processes of one host share it, so only ranks
on other hosts have anything to measure: they ask rank 0 for its time again and again over the job's store, and the
quickest answer counts. The error is at most half of its round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallTimeoutError
from deepspeed_mcrdl.stores import exchange

_QUESTIONS = 16

now_ns = time.monotonic_ns


def offset_ns(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    clock: Callable[[], int] = now_ns,
    machine: str | None = None,
) -> int:
    """Return what to add to this rank's time to have rank 0's, in nanoseconds; every rank calls it.

    Args:
        store: the job's store, the connection in which nobody waits.
        rank: this process's rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the others.
        clock: this rank's clock.
        machine: names what has one clock; None: this start of this host's system.

    Raises:
        CallTimeoutError: after `timeout_s` without an answer.
    """
    machines = exchange(store, "clocks", rank, world_size, machine or _boot(), timeout_s)
    elsewhere = [other for other in range(1, world_size) if machines[other] != machines[0]]
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        for other in elsewhere:
            for question in range(_QUESTIONS):
                _wait_for(store, f"clock/{other}/asked/{question}", deadline, f"rank {other}")
                store.set(f"clock/{other}/told/{question}", str(clock()))
        return 0
    if rank not in elsewhere:
        return 0
    found = []
    for question in range(_QUESTIONS):
        asked = clock()
        store.set(f"clock/{rank}/asked/{question}", "now")
        told = int(_wait_for(store, f"clock/{rank}/told/{question}", deadline, "rank 0"))
        answered = clock()
        found.append((answered - asked, told - (asked + answered) // 2))
    return min(found)[1]


def _wait_for(store: Store, key: str, deadline: float, who: str) -> bytes:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CallTimeoutError(f"{who} did not come to compare its clock; see its output")
        time.sleep(0)
    value = store.get(key)
    store.delete_key(key)
    return value


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        import socket

        return socket.gethostname()
