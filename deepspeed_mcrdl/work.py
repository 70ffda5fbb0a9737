"""What a call gives back: `Pending` from a backend, `Work` for the caller.

A backend starts every operation without blocking and hands out a Pending. A blocking call polls it to its end; an
asynchronous one wraps it in a Work. On a CPU the results are there when wait() returns; on a GPU wait() makes the
current stream wait.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from deepspeed_mcrdl.errors import failed

_NAP_S = 50e-6
_SETTLE_S = 0.5
_AS_IT_IS = nullcontext()

# What failed calls have under way: something may still use their buffers.
lost: list[object] = []


def as_made(inference: bool) -> AbstractContextManager[None]:
    """Return the context for a part of a call, whatever thread goes on with it: the inference mode it was made in."""
    return _AS_IT_IS if torch.is_inference_mode_enabled() is inference else _in_mode(inference)


@contextmanager
def _in_mode(inference: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.no_grad():  # leaving inference mode alone would record gradients
        yield


class Pending(ABC):
    """An operation under way, as its backend hands it out. It keeps the buffers alive.

    Attributes:
        host_driven: whether it progresses only while somebody polls it.
        stream_ordered: whether its results are ordered by the current stream (`order`), without blocking the host.
        yields_s: how long a waiting thread gives its core away again and again before it goes to sleep.
    """

    host_driven: bool = False
    stream_ordered: bool = False
    yields_s: float = 0.02

    @abstractmethod
    def poll(self) -> bool:
        """Give it a chance to progress; return whether it is done, or raise its error. Must not block.

        It is not called again once it has returned True or raised.
        """

    def block(self, limit_s: float) -> None:
        """Sleep until it may be done or go on, for at most `limit_s` seconds."""
        time.sleep(min(limit_s, _NAP_S))

    def orderable(self) -> bool:
        """Give it a chance to progress; return whether `order` may be called, or raise its error. Must not block.

        Unlike `poll` it may be called again, since each wait orders the stream that is current then.
        """
        return True

    def order(self) -> None:
        """Make the current stream wait for it, if it is stream-ordered."""
        raise NotImplementedError

    def source_rank(self) -> int:
        """Return the global rank that a completed receive got its message from."""
        raise RuntimeError("source_rank() is known only of a receive")


class Done(Pending):
    """An operation that was over when it was started."""

    def poll(self) -> bool:
        return True


DONE = Done()


class Then(Pending):
    """A Pending followed by a step of its own, such as copying a result to where the caller wants it."""

    def __init__(self, first: Pending, step: Callable[[], None]) -> None:
        self._first = first
        self._step: Callable[[], None] | None = step
        self.host_driven = first.host_driven
        self.yields_s = first.yields_s

    def poll(self) -> bool:
        if not self._first.poll():
            return False
        step, self._step = self._step, None
        if step is not None:
            step()
        return True

    def block(self, limit_s: float) -> None:
        self._first.block(limit_s)

    def source_rank(self) -> int:
        return self._first.source_rank()


class Together(Pending):
    """Several Pendings as one: done when all are, or with the first error."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._left = list(parts)
        self.host_driven = any(part.host_driven for part in parts)
        self.stream_ordered = any(part.stream_ordered for part in parts)

    def poll(self) -> bool:
        self._poll(self._left)
        if not self._left:
            return True
        self.yields_s = self._left[0].yields_s
        return False

    def _poll(self, parts: Sequence[Pending]) -> None:
        for part in tuple(parts):
            try:
                if part.poll():
                    self._left.remove(part)
            except Exception:
                lost.extend(self._left)
                raise

    def orderable(self) -> bool:
        self._poll([part for part in self._left if not part.stream_ordered])
        return all(part.stream_ordered and part.orderable() for part in self._left)

    def block(self, limit_s: float) -> None:
        for part in self._left[:1]:  # another wait may have ended the last one
            part.block(limit_s)

    def order(self) -> None:
        for part in self._left:
            part.order()


class Waiters:
    """Threads for functions that block, each used again when it is idle."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._made = 0

    def run(self, function: Callable[[], None]) -> None:
        """Run `function`, which must not raise, in a thread."""
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = queue.SimpleQueue()
            self._made += 1
            threading.Thread(target=self._serve, args=(tasks,), name="mcrdl-wait", daemon=True).start()
        tasks.put(function)

    def settle(self) -> None:
        """Wait a moment for the threads to be idle: one that is in torch when Python ends can abort it."""
        deadline = time.monotonic() + _SETTLE_S
        while len(self._idle) < self._made and time.monotonic() < deadline:
            time.sleep(_NAP_S)

    def _serve(self, tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            tasks.get()()
            self._idle.append(tasks)


waiters = Waiters()


class Driven(Protocol):
    """What progresses only while somebody drives it."""

    def advance(self) -> object:
        """Give it a chance to progress. Must not block."""


class Waits(Protocol):
    """Who waits: safety.Progress."""

    def watch(self, work: Driven) -> None: ...

    def forget(self, work: Driven) -> None: ...

    def send_held(self) -> None: ...

    def finish(self, poll: Callable[[], bool], pending: Pending, call: Any, limit_s: float | None = None) -> None: ...


class Work:
    """The handle of an asynchronous call. Any thread may wait for it; the results are those of the call.

    Args:
        pending: the operation under way.
        call: what the call is, for messages (safety.Call).
        waits: who waits.
    """

    def __init__(self, pending: Pending, call: Any, waits: Waits) -> None:
        self._pending = pending
        self._call = call
        self._waits = waits
        self._done = pending is DONE
        self._error: BaseException | None = None
        if self._done:
            return
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()  # a backend's operation is polled by one thread at a time
        if pending.host_driven:
            waits.watch(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is done; raise its error, or CallTimeoutError after `timeout`.

        None, and torch's "no timeout" (zero), mean the job's "timeout_s".
        """
        if not self._done:
            seen = self._ordered if self._pending.stream_ordered else self.advance
            self._waits.finish(seen, self._pending, self._call, timeout.total_seconds() if timeout else None)
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Return when what it does has happened, which on a GPU may be later than wait() returns; or raise its error.

        Raises:
            CallTimeoutError: after the job's "timeout_s".
        """
        if not self._done:
            self._waits.finish(self.advance, self._pending, self._call)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return whether the operation is done, successfully or not, without waiting for it."""
        if not self.advance():
            self._waits.send_held()  # somebody asks, perhaps until it is done
        return self._done

    def advance(self) -> bool:
        """Give the operation a chance to progress, whoever asks, and return whether it is done."""
        if not self._done and self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()
        return self._done

    def _ordered(self) -> bool:
        """Order the current stream after the operation, if that can be done by now."""
        with self._lock:
            if self._done:
                return True
            try:
                with as_made(self._inference):
                    if not self._pending.orderable():
                        return False
                self._pending.order()
            except Exception as error:
                self._error = failed(self._call, error)
                self._done = True
                self._waits.forget(self)
            return True  # it is polled on to its end, and each wait orders the stream that is current then

    def _advance(self) -> None:
        if self._done:
            return
        try:
            with as_made(self._inference):
                if not self._pending.poll():
                    return
        except Exception as error:
            self._error = failed(self._call, error)
        self._done = True
        self._waits.forget(self)

    def exception(self) -> BaseException | None:
        """Return the error that the operation ended with, if it has."""
        self.is_completed()
        return self._error

    def is_success(self) -> bool:
        """Return whether the operation is done without an error."""
        return self.is_completed() and self._error is None

    def source_rank(self) -> int:
        """Return the global rank that a completed receive got its message from."""
        named: int | None = self._call.source
        return self._pending.source_rank() if named is None else named

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is completed by a thread waiting for this Work."""
        return future_of(self)


class AllOf:
    """Several Works as one: done when all are. Waits in the order given."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when all are done; raise the first error."""
        for work in self._works:
            work.wait(timeout)
        return True

    def finish(self) -> None:
        """Return when what all do has happened; or raise the first error."""
        for work in self._works:
            work.finish()

    def is_completed(self) -> bool:
        """Return whether all are done."""
        done = [work.is_completed() for work in self._works]  # each gets its chance to progress
        return all(done)

    def advance(self) -> bool:
        """Give each a chance to progress, whoever asks, and return whether all are done."""
        done = [work.advance() for work in self._works]
        return all(done)

    def is_success(self) -> bool:
        """Return whether all are done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the first error, if there is one."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is completed by a thread waiting for all."""
        return future_of(self)


def future_of(work: Work | AllOf, results: Sequence[torch.Tensor] | None = None) -> torch.futures.Future[Any]:
    """Return a future with `results`, completed by a thread when what `work` does has happened, on a GPU too."""
    future: torch.futures.Future[Any] = torch.futures.Future()

    def complete() -> None:
        # Whoever waits sees either; a future that nobody holds any more can't take them.
        with suppress(RuntimeError):
            try:
                work.finish()  # which, unlike a wait, puts nothing in order with a stream that others use
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(results)

    waiters.run(complete)
    return future
