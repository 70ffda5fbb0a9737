"""Where the ranks tell each other what they wait in, so that a late call can name who is missing.

Only a wait that is long already comes here, and the making of a group. Everything goes through a thread, so that a
store that answers no more (its host is stopped or gone) can't hold up the rank that asks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from deepspeed_mcrdl.groups import Group

_ANSWER_WITHIN_S = 0.6
_SETTLE_S = 0.4


class Meeting(NamedTuple):
    """Where ranks come together, once or again and again.

    Attributes:
        key: the same on all of them.
        ranks: their global ranks.
        rank: this process's place in `ranks`.
    """

    key: str
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, group: Group) -> Meeting:
        """Return that of a group's collectives."""
        return cls(f"group {group.number}", group.ranks, group.rank)


class Arrivals:
    """What each rank waits in, as far as it has waited for long.

    Args:
        store: the job's store, the connection in which nobody waits.
        rank: this process's global rank.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = PrefixStore("arrivals", store)
        self._rank = rank
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any] | None, Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def come(self, meeting: Meeting, number: int) -> None:
        """Tell that this rank has come to where the members of `meeting` come together the `number`th time."""
        self._run(lambda: self._store.set(f"{meeting.key}/{meeting.rank}", str(number)))

    def announce(self, what: str) -> None:
        """Tell that this rank waits in `what`."""
        self._run(lambda: self._store.set(f"rank/{self._rank}", what))

    def withdraw(self) -> None:
        """Tell that this rank waits no longer."""
        self._run(lambda: self._store.set(f"rank/{self._rank}", ""))

    def missing(self, meeting: Meeting, number: int) -> str:
        """Return in words which ranks did not come together the `number`th time, and what they do instead."""

        def look() -> str:
            time.sleep(_SETTLE_S)  # others, who came a little later, have to announce it first
            absent = [
                f"rank {rank} did not arrive{self._instead(rank)}"
                for index, rank in enumerate(meeting.ranks)
                if index != meeting.rank and self._reached(f"{meeting.key}/{index}") < number
            ]
            return "; ".join(absent) or "all of its ranks arrived, so the backend or its network is stuck"

        return self._ask(look)

    def doing(self, group: Group, rank: int | None) -> str:
        """Return in words what the peers of a message (None: all others of `group`) wait in."""

        def look() -> str:
            peers = [rank] if rank is not None else [r for r in group.ranks if r != self._rank]
            return "; ".join(f"rank {peer} did not take part{self._instead(peer)}" for peer in peers)

        return self._ask(look)

    def _reached(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def _instead(self, rank: int) -> str:
        key = f"rank/{rank}"
        what = self._store.get(key).decode() if self._store.check([key]) else ""
        return f" (it waits in {what})" if what else " (it is in no call, or has ended; see its output)"

    def _ask(self, look: Callable[[], str]) -> str:
        try:
            return str(self._run(look).result(_ANSWER_WITHIN_S))
        except Exception:  # also a store that is gone, which is what is told then
            return "the job's store does not answer, so rank 0 or the launcher has probably ended; see its output"

    def _run(self, task: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mcrdl-arrivals", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        if self._thread is not None:
            self._tasks.put((None, Future()))
            self._thread.join(_ANSWER_WITHIN_S)

    def _serve(self) -> None:
        while True:
            task, future = self._tasks.get()
            if task is None:
                return
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
