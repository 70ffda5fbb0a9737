"""Handles of calls under way: wait, is_completed, is_success, exception, get_future.

A Work keeps the tensors of its call alive until it is done. On a CPU the results are there when wait() returns; on a
GPU wait() makes the current stream wait.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch


class Work(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is done; raise its error, or TimeoutError after `timeout`."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the operation is done, successfully or not, without waiting for it."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return the error that the operation ended with, if it has."""

    def is_success(self) -> bool:
        """Return whether the operation is done without an error."""
        return self.is_completed() and self.exception() is None

    def source_rank(self) -> int:
        """Return the global rank that a receive from any source got its message from."""
        raise RuntimeError("source_rank() is known only of a completed receive")

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is completed by a thread waiting for this Work."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=complete, name="mcrdl-future", daemon=True).start()
        return future


class FinishedBy(Work):
    """A Work followed by a step of its own, such as copying a result to where the caller wants it.

    Args:
        work: the operation under way.
        finish: called once, when the operation is first seen to be done.
    """

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout)
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._work.exception() is None:
            self._finish_once()
        return True

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _finish_once(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()


class AllOf(Work):
    """Several operations as one: done when all are. Waits in the order given."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)
