"""The order that keeps mixed backends from deadlock: nobody waits inside one backend while another needs the host.

MPI moves large messages only inside MPI calls. A rank that blocks in gloo while its own MPI operation is unfinished
can starve the peer that waits in MPI, and the peer may be the one that gloo waits for. The rule: while an operation
that progresses only inside calls is unfinished, every wait on another backend is a loop that drives it too. No call
is finished earlier or later than the program says, so whatever is free of deadlock on one backend stays so on several.
docs/DEADLOCK.md has the argument.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import MCRDLError
from deepspeed_mcrdl.groups import Group, Groups

_SPINS_BEFORE_SLEEP = 200
_POLL_SLEEP_S = 50e-6
_DRIVE_EVERY = 64


class HostDriven(Protocol):
    """An operation that progresses only while somebody calls into its backend."""

    def poll(self) -> None:
        """Give it a chance to progress; must not block."""


class Progress:
    """The unfinished host-driven operations of this process."""

    def __init__(self) -> None:
        self._unfinished: dict[HostDriven, None] = {}

    def add(self, work: HostDriven) -> None:
        """Count `work` as unfinished; its buffers stay alive until it is discarded."""
        self._unfinished[work] = None
        if len(self._unfinished) % _DRIVE_EVERY == 0:  # works that nobody waits for must not pile up
            self.drive()

    def discard(self, work: HostDriven) -> None:
        """`work` is done."""
        self._unfinished.pop(work, None)

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    def drive(self) -> None:
        """Give every unfinished operation a chance to progress."""
        for work in tuple(self._unfinished):
            work.poll()

    def wait_until(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Drive until `done()`; return False if that takes longer than `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        spins = 0
        while not done():
            self.drive()
            spins += 1
            time.sleep(0 if spins < _SPINS_BEFORE_SLEEP else _POLL_SLEEP_S)
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True


def seconds(timeout: timedelta | None) -> float | None:
    """Return `timeout` in seconds; None and torch's "no timeout" (zero) mean no limit."""
    return timeout.total_seconds() if timeout else None


class MonitoredBarrier:
    """A barrier over the job's store that names the ranks that did not come, whatever the group's backends are."""

    def __init__(self, groups: Groups, progress: Progress) -> None:
        self._groups = groups
        self._progress = progress
        self._rounds: dict[Group, int] = {}

    def __call__(self, group: Group, timeout_s: float, wait_all_ranks: bool = False) -> None:
        """Return when every rank of `group` is here.

        Args:
            group: the ranks that meet.
            timeout_s: how long the group's first rank waits for the others.
            wait_all_ranks: whether all missing ranks are named, rather than the first one found missing.

        Raises:
            MCRDLError: on the first rank after `timeout_s`, naming the missing ranks; on the others as soon as the
                first rank has given up.
        """
        number = self._rounds[group] = self._rounds.get(group, 0) + 1
        prefix = f"monitored_barrier/{group.number}/{number}"
        if group.rank != 0:
            self._groups.store.set(f"{prefix}/{group.rank}", "here")
            self._wait_for_verdict(prefix, group, timeout_s)
            return
        missing = self._missing(prefix, group, timeout_s)
        named = missing if wait_all_ranks else missing[:1]
        self._groups.store.set(f"{prefix}/verdict", ",".join(map(str, named)) or "ok")
        if named:
            raise MCRDLError(_absent(group, named, timeout_s))

    def _missing(self, prefix: str, group: Group, timeout_s: float) -> list[int]:
        waiting = {index: f"{prefix}/{index}" for index in range(1, group.size)}

        def all_here() -> bool:
            for index in [i for i, key in waiting.items() if self._groups.store.check([key])]:
                del waiting[index]
            return not waiting

        self._progress.wait_until(all_here, timeout_s)
        return [group.ranks[index] for index in waiting]

    def _wait_for_verdict(self, prefix: str, group: Group, timeout_s: float) -> None:
        key = f"{prefix}/verdict"
        # The first rank may itself come late: that is its own timeout away, then it waits up to timeout_s for others.
        if not self._progress.wait_until(lambda: self._groups.store.check([key]), 2 * timeout_s):
            raise MCRDLError(_absent(group, [group.ranks[0]], 2 * timeout_s))
        verdict = self._groups.store.get(key).decode()
        if verdict != "ok":
            raise MCRDLError(_absent(group, [int(rank) for rank in verdict.split(",")], timeout_s))


def _absent(group: Group, ranks: list[int], timeout_s: float) -> str:
    return f"monitored_barrier on {group}: rank {', '.join(map(str, ranks))} did not arrive within {timeout_s:g} s"


def exchange(store: Store, key: str, rank: int, world_size: int, value: Any) -> list[Any]:
    """Return every rank's `value` (JSON), in rank order; a collective of the world over the launcher's store."""
    prefix = f"exchange/{key}"
    store.set(f"{prefix}/{rank}", json.dumps(value))
    if rank == 0:
        everything = [json.loads(store.get(f"{prefix}/{r}")) for r in range(world_size)]
        store.set(f"{prefix}/all", json.dumps(everything))
        return everything
    result: list[Any] = json.loads(store.get(f"{prefix}/all"))
    return result
