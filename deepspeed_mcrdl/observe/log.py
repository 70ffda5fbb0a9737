"""Counts calls, bytes and seconds for each operation and backend. Costs nothing until a runtime observes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.work import Work

T = TypeVar("T")


class CommunicationLog:
    """Calls, bytes and seconds by (operation, backend); may be fed from several threads.

    Bytes are the operation's `size` as this rank knows it. Seconds are the time that the calling thread spent in the
    call and, for asynchronous ones, in wait().
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()

    def add(self, operation: str, backend: str, bytes: int, seconds: float, calls: int = 1) -> None:
        """Add to the sums of (operation, backend)."""
        with self._lock:
            sums = self._sums.setdefault((operation, backend), [0, 0, 0.0])
            sums[0] += calls
            sums[1] += bytes
            sums[2] += seconds

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each (operation, backend), the costliest first."""
        with self._lock:
            rows = [
                {"operation": operation, "backend": backend, "calls": calls, "bytes": bytes, "seconds": seconds}
                for (operation, backend), (calls, bytes, seconds) in self._sums.items()
            ]
        return sorted(rows, key=lambda row: -row["seconds"])

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._sums.clear()

    def timed(self, call: Call, args: tuple[Any, ...], carry: Callable[[], Work | None]) -> Work | None:
        """Return what `carry` returns, with the call added here."""
        operation, group, backend, _ = call
        size = operation.size(group, *args)
        return timed(
            carry,
            lambda seconds: self.add(operation.name, backend, size, seconds),
            lambda seconds: self.add(operation.name, backend, 0, seconds, calls=0),
        )


def timed(
    carry: Callable[[], Work | None], called: Callable[[float], None], waited: Callable[[float], None]
) -> Work | None:
    """Return what `carry` returns; report the seconds that it takes and those of each wait for an asynchronous call."""
    start = time.perf_counter()
    work = carry()
    called(time.perf_counter() - start)
    return None if work is None else _TimedWork(work, waited)


class Wrapped(Work):
    """A Work in place of another one, which it asks for everything; a subclass sees what waits for it."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def seen(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns."""
        return wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is done."""
        return self.seen(partial(self._work.wait, timeout))

    def finish(self) -> None:
        """Return when what it does has happened."""
        self.seen(self._work.finish)

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        return self._work.is_completed()

    def advance(self) -> bool:
        """Give it a chance to progress."""
        return self._work.advance()


class _TimedWork(Wrapped):
    """A Work whose waits are reported."""

    def __init__(self, work: Work, report: Callable[[float], None]) -> None:
        super().__init__(work)
        self._report = report

    def seen(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns; the time that takes is reported."""
        start = time.perf_counter()
        try:
            return wait()
        finally:
            self._report(time.perf_counter() - start)
