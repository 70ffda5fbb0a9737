"""Lanes: calls that a transform carries by operations of its own, on a communicator that has no others.

The ranks of a group issue the calls of a lane in one order, and its operations follow each other in one order on all of
them, wherever each is in its program. Everything goes on in polls; making a call blocks nobody.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.safety import Progress

_STUCK_S = 5.0


class Lane(ABC):
    """One lane. A subclass has `_move`, `idle` and `end`, and says by `note` that something has happened."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of whoever moves the lane
        self._error: Exception | None = None
        self._noted = 0.0

    def advance(self) -> None:
        """Move what is under way. Does not block."""
        # A thread that finds another one at this has nothing to add. A backend's start may come back here, too.
        if self._error is not None or not self._turn.acquire(blocking=False):
            return
        try:
            self._move()
        except Exception as error:
            # Other ranks may have done what failed here, so that the order on the communicator is not known any more.
            self.end(error)
        finally:
            self._turn.release()

    def note(self) -> None:
        """A call has come, or an operation is done."""
        self._noted = time.monotonic()

    def still_for(self, seconds: float) -> bool:
        """Return whether nothing has happened for so long."""
        return time.monotonic() - self._noted > seconds

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    @abstractmethod
    def _move(self) -> None:
        """Poll what is under way and start what can be. Does not block; one thread is in it at a time."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether it has no calls."""

    @abstractmethod
    def end(self, error: Exception) -> None:
        """Let all calls end with `error`, also later ones."""


L = TypeVar("L", bound=Lane)


class Lanes(Generic[L]):
    """The lanes of one transform in this process.

    Args:
        groups: the groups of the job.
        progress: who waits.
    """

    def __init__(self, groups: Groups, progress: Progress) -> None:
        self._groups, self._progress = groups, progress
        self._own: dict[tuple[str, Group, str], Group] = {}
        self._lanes: dict[tuple[str, Group, str], L] = {}
        self._stopped: list[L] = []  # with operations that may write to their buffers still

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[L]:
        return iter(tuple(self._lanes.values()))

    def group_of(self, backend: Backend, group: Group, what: str) -> Group:
        """Return the Group whose communicator a lane is on; every member makes it at the same place.

        Each backend has one of its own: pairs with a backend in common share the communicators of a Group's parts.

        Args:
            backend: what carries the operations.
            group: the group of the calls.
            what: what becomes of the calls, such as "fused".
        """
        key = backend.name, group, what
        if key not in self._own:
            self._own[key] = self._groups.make(group.ranks, f"{group.name}/{group.number} {what} by {backend.name}")
        return self._own[key]

    def lane(self, backend: Backend, group: Group, what: str, make: Callable[[Group], L]) -> L:
        """Return the lane of these calls; `make` makes it for the Group of `group_of`, which the backend has joined."""
        key = backend.name, group, what
        if key not in self._lanes:
            self._lanes[key] = make(self.group_of(backend, group, what))
        return self._lanes[key]

    def leave(self, group: Group) -> list[Group]:
        """End the lanes of a group that is being destroyed, and return the Groups made for it."""
        self._end([key for key in self._lanes if key[1] is group], f"{group} was destroyed before the call was done")
        return [self._own.pop(key) for key in tuple(self._own) if key[1] is group]

    def close(self) -> None:
        """End all lanes."""
        self._end(list(self._lanes), "communication was ended before the call was done")

    def _end(self, keys: list[tuple[str, Group, str]], reason: str) -> None:
        lanes, limit_s = [self._lanes[key] for key in keys], self._progress.timeout_s

        def over() -> bool:
            return all(lane.idle or lane.failed or lane.still_for(min(_STUCK_S, limit_s)) for lane in lanes)

        if not over():
            # The other ranks may still wait for calls that nobody waits for here.
            self._progress.wait_until(over, limit_s)
        for key in keys:
            lane = self._lanes.pop(key)
            if not lane.idle:
                self._stopped.append(lane)
            lane.end(RuntimeError(reason))
