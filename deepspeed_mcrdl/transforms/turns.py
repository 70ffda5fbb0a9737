"""The order in which calls start that can't start at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from deepspeed_mcrdl.work import Pending, as_made


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

    def take(self, lane: Hashable, start: Callable[[], Pending], ready: Callable[[], bool]) -> Turn:
        """Return a call that `start` starts when it is ready and the earlier ones of its lane have started."""
        turn = Turn(self, lane, start, ready)
        self._waiting.append(turn)
        self.advance()
        return turn

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


class Turn(Pending):
    """A call that starts in its turn."""

    host_driven = True

    def __init__(self, turns: Turns, lane: Hashable, start: Callable[[], Pending], ready: Callable[[], bool]) -> None:
        self.lane = lane
        self._turns = turns
        self._start: Callable[[], Pending] | None = start
        self._ready = ready
        self._inference = torch.is_inference_mode_enabled()
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
            with as_made(self._inference):
                pending = start()
            self.yields_s = pending.yields_s
            self.stream_ordered = pending.stream_ordered
            self._pending = pending  # last: another thread may look
        except Exception as error:  # it is this call's, whoever's poll has started it
            self._error = error

    def poll(self) -> bool:
        if not self.started:
            self._turns.advance()
        if self._error is not None:
            raise self._error
        return self._pending is not None and self._pending.poll()

    def orderable(self) -> bool:
        return self._pending is not None and self._pending.orderable()

    def order(self) -> None:
        assert self._pending is not None, "order() comes after orderable()"
        self._pending.order()

    def block(self, limit_s: float) -> None:
        if self._pending is None:
            super().block(limit_s)
        else:
            self._pending.block(limit_s)

    def source_rank(self) -> int:
        return super().source_rank() if self._pending is None else self._pending.source_rank()
