"""The order in which calls start that can't start at once, and calls made of steps that start one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.work import Pending

# (backend, operation, group, arguments) -> the backend's method for them, with what it needs before and after.
Fit = Callable[[Backend, Operation, Group, tuple[Any, ...]], Callable[..., Pending]]


class Step(NamedTuple):
    """One step of a call: an operation on a part of its group; `arguments` is called when it starts."""

    backend: Backend
    group: Group
    operation: Operation
    arguments: Callable[[], tuple[Any, ...]]


class Kept(Protocol):
    """A call whose buffers something may still use when nobody waits for it any more."""

    def copied_back(self) -> bool:
        """Return whether nothing uses them any more."""


class Turns:
    """The order in which calls start: that of the program within each lane.

    A lane is what the ranks must start in the same order: the collectives of a group, messages with the same tag. This
    is the order that NCCL keeps on the GPU: a collective runs after the kernels that it needs and after the earlier
    ones of its communicator, and waits for nothing else.

    Waiting in the call itself would be simpler, but what it waits for may end only when other ranks come, and these
    may wait for what this rank does next.
    """

    def __init__(self) -> None:
        self._waiting: list[Turn] = []
        self._lock = threading.Lock()
        self._alive: set[Kept] = set()

    def take(self, lane: Hashable, start: Callable[[], Pending], ready: Callable[[], bool]) -> Turn:
        """Return a call that `start` starts when it is ready and the earlier ones of its lane have started."""
        turn = Turn(self, lane, start, ready)
        self._waiting.append(turn)
        self.advance()
        return turn

    def chain(self, fit: Fit, steps: Sequence[Step], finish: Callable[[], object] | None = None) -> Pending:
        """Return a call in steps, each of which starts when the one before it is done.

        The lane of a step is its backend's communicator of its group: there the steps of all calls start in the order
        of the calls, so that its ranks see one order, however long the steps before took on each.

        Args:
            fit: gives the method of a step.
            steps: the steps.
            finish: called once when all are done.
        """
        turns: list[Turn] = []
        for step in steps:
            ready = turns[-1].poll if turns else _at_once
            turns.append(self.take(step[:2], partial(_start, fit, step), ready))
        return Chain(turns, finish)

    def free(self, lane: Hashable) -> bool:
        """Return whether no call of the lane waits to be started."""
        return not any(turn.lane == lane for turn in tuple(self._waiting))

    def advance(self) -> None:
        """Start all calls whose turn it is."""
        # A thread that finds another one at this has nothing to add. Starting may come back here, too.
        if not self._lock.acquire(blocking=False):
            return
        try:
            held = set()
            for turn in tuple(self._waiting):
                if turn.lane not in held and turn.ready():
                    turn.start()
                    self._waiting.remove(turn)
                else:
                    held.add(turn.lane)
        finally:
            self._lock.release()

    def keep(self, call: Kept) -> None:
        """Keep the buffers of `call` until it has ended, even if nobody waits for it any more."""
        for other in tuple(self._alive):
            if other.copied_back():
                self.release(other)
        self._alive.add(call)

    def release(self, call: Kept) -> None:
        """`call` has ended."""
        self._alive.discard(call)


class Turn(Pending):
    """A call that starts in its turn."""

    host_driven = True

    def __init__(self, turns: Turns, lane: Hashable, start: Callable[[], Pending], ready: Callable[[], bool]) -> None:
        self.lane = lane
        self._turns = turns
        self._start: Callable[[], Pending] | None = start
        self._ready = ready
        self._pending: Pending | None = None
        self._error: Exception | None = None

    @property
    def started(self) -> bool:
        """Whether it has started, or failed."""
        return self._pending is not None or self._error is not None

    def ready(self) -> bool:
        try:
            return self._ready()
        except Exception as error:  # what comes before it has failed: the call ends with its error when it is started
            self._error = error
            return True

    def start(self) -> None:
        start, self._start = self._start, None  # which holds the arguments
        if start is None or self._error is not None:
            return
        try:
            self._pending = start()
            self.yields_s = self._pending.yields_s
        except Exception as error:  # it is this call's, whoever's poll has started it
            self._error = error

    def poll(self) -> bool:
        if not self.started:
            self._turns.advance()
        if self._error is not None:
            raise self._error
        return self._pending is not None and self._pending.poll()

    def block(self, limit_s: float) -> None:
        if self._pending is None:
            super().block(limit_s)
        else:
            self._pending.block(limit_s)

    def source_rank(self) -> int:
        return super().source_rank() if self._pending is None else self._pending.source_rank()


class Chain(Pending):
    """A call in steps, then what makes its result of the last one's.

    Args:
        steps: the steps, each of which waits for the one before it.
        finish: called once when all are done.
    """

    host_driven = True

    def __init__(self, steps: Sequence[Turn], finish: Callable[[], object] | None) -> None:
        self._steps = steps
        self._finish = finish

    def poll(self) -> bool:
        # The others are polled by those that wait for them, so that no two threads do it at once.
        if not self._steps[-1].poll():
            self.yields_s = next(
                step.yields_s for step in reversed(self._steps) if step.started or step is self._steps[0]
            )
            return False
        if self._finish is not None:
            self._finish()
        return True

    def block(self, limit_s: float) -> None:
        self._steps[-1].block(limit_s)


def _at_once() -> bool:
    return True


def _start(fit: Fit, step: Step) -> Pending:
    arguments = step.arguments()
    return fit(step.backend, step.operation, step.group, arguments)(step.group, *arguments)
