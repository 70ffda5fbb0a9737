"""The one place where a rank waits: it drives what needs the host, and it ends in bounded time.

MPI moves large messages only inside MPI calls. A rank that blocks in gloo while its own MPI operation is unfinished
can starve the peer that waits in MPI, and the peer may be the one that gloo waits for. The rule: every operation is
started without blocking, and every wait is one loop that drives all backends that progress only inside calls. No call
is finished earlier or later than the program says, so whatever is free of deadlock on one backend stays so on several.
docs/DEADLOCK.md has the argument.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from deepspeed_mcrdl.arrivals import Arrivals, Meeting
from deepspeed_mcrdl.errors import CallTimeoutError, failed
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.operations import RECV, Operation
from deepspeed_mcrdl.stores import waits_end_with
from deepspeed_mcrdl.work import Driven, Pending

_HOT_POLLS = 1000
_HOT_POLLS_CROWDED = 20
_NAP_S = 50e-6
_LONGEST_NAP_S = 1e-3
_NAP_SHARE = 1 / 16  # of the time waited so far, so that a nap adds little to it
_BACKGROUND_S = 1e-3
_BLOCK_S = 0.2
_ANNOUNCE_AFTER_S = 0.25
_DRIVE_EVERY = 64
_GIVE_UP_S = 1.0  # for a thread to end that waits in the job's store: one that is in it when Python ends aborts it

T = TypeVar("T")

_here = threading.local()


class Call(NamedTuple):
    """A call as messages tell of it.

    Attributes:
        operation: the operation.
        group: its group.
        backend: name of the backend that carries it.
        number: how manieth collective of the group it is on this rank; for a message the peer's global rank, None for
            any.
    """

    operation: Operation
    group: Group
    backend: str
    number: int | None

    @property
    def source(self) -> int | None:
        """The global rank that a receive names, if this is one that does."""
        return self.number if self.operation is RECV else None

    def __str__(self) -> str:
        if self.operation.collective:
            return f"{self.operation.name} #{self.number} on {self.group} by {self.backend}"
        direction = "to" if self.operation.name == "send" else "from"
        peer = "any rank" if self.number is None else f"rank {self.number}"
        return f"{self.operation.name} {direction} {peer} on {self.group} by {self.backend}"


class Progress:
    """The wait loop, and the unfinished operations of this process that it has to drive.

    Args:
        timeout_s: how long a call may take.
        arrivals: where ranks tell each other what they wait in; without it a late call names no missing ranks.
        crowded: whether this host has more ranks than cores, so that a waiting rank must not keep its core.
    """

    def __init__(self, timeout_s: float, arrivals: Arrivals | None = None, crowded: bool = False) -> None:
        self.timeout_s = timeout_s
        self._arrivals = arrivals
        self._hot_polls = _HOT_POLLS_CROWDED if crowded else _HOT_POLLS
        self._unfinished: dict[Driven, None] = {}
        self._held: list[Callable[[], None]] = []
        self._engines: list[Callable[[], object]] = []
        self._background: threading.Thread | None = None
        self._closed = threading.Event()

    def add_engine(self, turn: Callable[[], object]) -> None:
        """Call `turn` in every wait: it moves what a backend has to move while the host is inside it.

        Unfinished operations are not all: MPI may call an operation done on a rank that has yet to pass its data on.
        """
        self._engines.append(turn)

    def remove_engine(self, turn: Callable[[], object]) -> None:
        """Call `turn` no more."""
        self._engines.remove(turn)

    def hold(self, send: Callable[[], None]) -> None:
        """Call `send` wherever this rank waits: others may need the calls that are held back here."""
        self._held.append(send)

    def let_go(self, send: Callable[[], None]) -> None:
        """Call `send` no more."""
        self._held.remove(send)

    def send_held(self) -> None:
        """Send off the calls that are held back. Does not block."""
        for send in self._held:
            send()

    def watch(self, work: Driven) -> None:
        """Drive `work` in every wait until it is forgotten; its buffers stay alive until then."""
        self._unfinished[work] = None
        if len(self._unfinished) % _DRIVE_EVERY == 0:  # works that nobody waits for must not pile up
            self.drive()

    def forget(self, work: Driven) -> None:
        """`work` is done."""
        self._unfinished.pop(work, None)

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    def drive(self) -> None:
        """Give every backend and every unfinished operation a chance to progress."""
        for turn in self._engines:
            turn()
        for work in tuple(self._unfinished):
            work.advance()

    def drive_in_background(self) -> None:
        """Drive in a thread too while there are unfinished operations, for a host that also waits elsewhere."""
        self._background = threading.Thread(target=self._drive_on, name="mcrdl-drive", daemon=True)
        self._background.start()

    def _drive_on(self) -> None:
        while not self._closed.wait(_BACKGROUND_S):
            if self._unfinished:
                self.send_held()
                self.drive()

    def close(self) -> None:
        """End the thread that drives, if there is one."""
        self._closed.set()
        if self._background is not None:
            self._background.join()

    def finish(self, poll: Callable[[], bool], pending: Pending, call: Call, limit_s: float | None = None) -> None:
        """Return when `poll()` is true.

        Args:
            poll: polls `pending`.
            pending: what is waited for.
            call: what it is, for messages.
            limit_s: how long to wait, in seconds; None or 0: the job's limit.

        Raises:
            CallTimeoutError: after `limit_s`, naming the call and the ranks that did not come to it.
            CallFailedError: if the backend raises an error.
        """
        try:
            for _ in range(self._hot_polls if pending.host_driven else 1):
                if poll():
                    return
            self._wait(poll, pending, call, limit_s or self.timeout_s)
        except Exception as error:
            raise failed(call, error)  # noqa: B904 - it has its cause

    def _wait(self, poll: Callable[[], bool], pending: Pending, call: Call, limit_s: float) -> None:
        start = time.monotonic()
        announced = False
        while not poll():
            self.send_held()
            self.drive()
            waited = time.monotonic() - start
            if waited < pending.yields_s:
                os.sched_yield()
            elif self._unfinished or self._engines:
                nap_s = _NAP_S if self._unfinished else min(_LONGEST_NAP_S, waited * _NAP_SHARE)
                (pending.block if pending.host_driven else time.sleep)(nap_s)
            else:
                pending.block(min(_BLOCK_S, limit_s))
            if waited > _ANNOUNCE_AFTER_S and not announced and self._arrivals is not None:
                if call.operation.collective:
                    self._arrivals.come(Meeting.of(call.group), call.number or 0)
                self._arrivals.announce(str(call))
                announced = True
            if waited > limit_s:
                raise CallTimeoutError(self._late(call, waited, limit_s))
        if announced and self._arrivals is not None:  # after an error others still want to know
            self._arrivals.withdraw()

    def _late(self, call: Call, waited_s: float, limit_s: float) -> str:
        text = f"{call} was not done after {waited_s:.1f} s (the timeout is {limit_s:g} s)"
        if self._arrivals is None:
            return text
        if call.operation.collective:
            return f"{text}: {self._arrivals.missing(Meeting.of(call.group), call.number or 0)}"
        return f"{text}: {self._arrivals.doing(call.group, call.number)}"

    def meet(self, function: Callable[[], T], what: str, meeting: Meeting) -> T:
        """Return what a function returns that blocks until others come, such as one that makes a group, and drive.

        Args:
            function: runs in a thread. One that is called by it meets in that thread.
            what: what it makes, in words.
            meeting: who has to come.

        Raises:
            CallTimeoutError: if it takes longer than the job's limit, naming the ranks that did not come.
            CallFailedError: if it raises an error.
        """
        if getattr(_here, "meeting", False):
            return function()
        results: list[T] = []
        errors: list[Exception] = []
        given_up = threading.Event()

        def body() -> None:
            _here.meeting = True
            waits_end_with(given_up)
            try:
                results.append(function())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=body, name="mcrdl-meet", daemon=True)
        began = time.monotonic()
        if self._arrivals is not None:
            self._arrivals.come(meeting, 1)  # at once: the first to come need not wait
        thread.start()
        quick_s = min(_ANNOUNCE_AFTER_S, self.timeout_s)
        if not self.wait_until(lambda: not thread.is_alive(), quick_s):
            if self._arrivals is not None:
                self._arrivals.announce(f"making {what}")
            self.wait_until(lambda: not thread.is_alive(), self.timeout_s - quick_s)
            # What the thread waits in can have the same limit, and say less.
            if not results and time.monotonic() - began >= self.timeout_s:
                given_up.set()
                missing = "a rank is late" if self._arrivals is None else self._arrivals.missing(meeting, 1)
                thread.join(_GIVE_UP_S)
                raise CallTimeoutError(f"{what} was not made within {self.timeout_s:g} s: {missing}")
            if self._arrivals is not None:
                self._arrivals.withdraw()
        if errors:
            raise failed(what, errors[0])
        return results[0]

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Drive until `done()`, which asks something else than a backend; return False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            self.send_held()
            self.drive()
            time.sleep(_NAP_S)
            if time.monotonic() > deadline:
                return False
        return True


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
            CallTimeoutError: on the first rank after `timeout_s`, naming the missing ranks; on the others as soon as
                the first rank has given up.
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
            raise CallTimeoutError(_absent(group, named, timeout_s))

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
            raise CallTimeoutError(_absent(group, [group.ranks[0]], 2 * timeout_s))
        verdict = self._groups.store.get(key).decode()
        if verdict != "ok":
            raise CallTimeoutError(_absent(group, [int(rank) for rank in verdict.split(",")], timeout_s))


def _absent(group: Group, ranks: list[int], timeout_s: float) -> str:
    return f"monitored_barrier on {group}: rank {', '.join(map(str, ranks))} did not arrive within {timeout_s:g} s"
