"""What watches the calls of a runtime as the config's "observe" block asks: one observer for all that is asked.

On the way of a call it takes the time, adds to a few sums and leaves an entry for the thread that writes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.config import Observe
from deepspeed_mcrdl.errors import CallError, CallTimeoutError, MismatchError
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.observe import stragglers, summary, trace
from deepspeed_mcrdl.observe.clock import now_ns, offset_ns
from deepspeed_mcrdl.observe.figures import Cell, Figures, Key, communication_ns, merge, rows
from deepspeed_mcrdl.observe.files import LineFile, Writer, begin
from deepspeed_mcrdl.observe.flight import DONE, FAILED, IN_FLIGHT, WAITING, Handle, Recorder
from deepspeed_mcrdl.observe.log import Wrapped
from deepspeed_mcrdl.observe.steps import EngineSteps
from deepspeed_mcrdl.observe.trace import Events
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.stores import exchange
from deepspeed_mcrdl.work import Pending, Work

T = TypeVar("T")
_MB = 1_000_000
_LINE_AFTER_S = 5.0  # without steps


class _Local(threading.local):
    waits_since = 0


class WaitClock(Progress):
    """A wait loop that knows since when each thread has waited."""

    _local = _Local()

    def finish(self, poll: Callable[[], bool], pending: Pending, call: Call, limit_s: float | None = None) -> None:
        self._local.waits_since = now_ns()
        super().finish(poll, pending, call, limit_s)


class Session:
    """Watches the calls of one runtime from its start to its end.

    Args:
        config: what is asked.
        store: the job's store, the connection in which nobody waits.
        rank: this process's rank.
        world_size: number of ranks.
        timeout_s: how long a rank may wait for the others at the start.
        about: what the files say of the job: backends, routes.
        why: (call, arguments) -> why the call's backend carries it, in words.

    Raises:
        ConfigError: if the folder can't be made.
        CallTimeoutError: if another rank does not come.
    """

    def __init__(
        self,
        config: Observe,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        about: Mapping[str, Any],
        why: Callable[[Call, tuple[Any, ...]], str],
    ) -> None:
        self._config = config
        self._rank = rank
        self._why = why
        self._local = WaitClock._local
        self._store, self._world_size, self._timeout_s = store, world_size, timeout_s
        folder = Path(config.folder)
        begin(folder, rank, everybody=rank == 0)
        self._start = {
            "kind": "start",
            "rank": rank,
            "world_size": world_size,
            "host": socket.gethostname(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "time_ns": now_ns(),
            "offset_ns": offset_ns(store, rank, world_size, timeout_s),
            **about,
        }
        most_bytes = int(config.max_mb * _MB)
        self._figures = Figures() if config.figures else None
        self._totals: dict[Key, Cell] = {}
        self._reasons: dict[Key, str] = {}
        self._lock = threading.Lock()
        self._began_ns = self._line_ns = now_ns()
        self._step_ns: int | None = None
        self._communicated_ns = 0
        self._last: dict[str, Any] | None = None
        self._steps: list[tuple[int, int, int]] = []
        self._log = None
        if config.log:
            file = LineFile(folder, "log", rank, most_bytes, partial(summary.line, self._start))
            self._log = Writer(file, summary.line, self._line_without_steps)
        self._trace = None
        if config.trace:
            events = Events(self._start)
            self._trace = Writer(LineFile(folder, trace.KIND, rank, most_bytes, events.head), events.lines)
        self._flight = Recorder(folder, config.flight_calls, self._start) if config.flight else None
        self._calls = stragglers.Calls(self._start["offset_ns"]) if config.stragglers else None
        self._exchanges = 0
        self._profiles = config.profiler
        self._engine_steps = EngineSteps(self.step, self.events if config.monitor else None)
        if config.steps == "engine":
            self._engine_steps.attach()

    def timed(self, call: Call, args: tuple[Any, ...], carry: Callable[[], Work | None]) -> Work | None:
        """Return what `carry` returns, with the call seen."""
        operation, group, backend, number = call
        size = operation.size(group, *args)
        local = self._local
        local.waits_since = 0
        start = now_ns()
        flight = self._flight
        handle = None if flight is None else flight.begin(call, size, start)
        try:
            work = carry() if not self._profiles else self._profiled(call, size, carry)
        except BaseException as error:
            self.failed(error, handle)
            raise
        end = now_ns()
        if flight is not None and handle is not None:
            if work is None:
                flight.mark(handle, DONE, end)
            else:
                flight.mark(handle, IN_FLIGHT)
        if self._calls is not None and operation.collective:
            self._calls.add(operation.name, group, number or 0, start)
        key = (operation, group, backend, (size - 1 if size else 0).bit_length())
        figures = self._figures
        if work is None:
            since = local.waits_since or end
            if self._trace is not None:
                self._trace.put((get_ident(), (call, size, start, since, end)))
            if figures is not None and figures.called(key, size, since - start, end - since):
                self._first(key, call, args)
            return None
        if figures is not None and figures.started(key, size, end - start):
            self._first(key, call, args)
        if self._trace is not None:
            self._trace.put((get_ident(), (call, size, start, 0, end)))
        return _Seen(work, self, call, key, size, start, handle)

    def _profiled(self, call: Call, size: int, carry: Callable[[], Work | None]) -> Work | None:
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return carry()
        with torch.profiler.record_function(f"mcrdl {call.operation.name} {call.backend} {size} B"):
            return carry()

    def _first(self, key: Key, call: Call, args: tuple[Any, ...]) -> None:
        """Keep why calls like this one go where they go."""
        if key not in self._reasons:
            self._reasons[key] = self._why(call, args)

    def failed(self, error: BaseException, handle: Handle | None) -> None:
        """A call, or the wait for it, has ended with an error."""
        if self._flight is not None and handle is not None:
            self._flight.mark(handle, FAILED, now_ns())
            if isinstance(error, CallTimeoutError | MismatchError):
                self._flight.dump(str(error))

    def waits(self, handle: Handle | None) -> None:
        """An asynchronous call is being waited for."""
        if self._flight is not None and handle is not None:
            self._flight.mark(handle, WAITING)

    def waited(
        self, call: Call, key: Key, size: int, issued_at: int, handle: Handle | None, start: int, end: int
    ) -> None:
        """An asynchronous call was seen to be done at `end`, when it had been waited for since `start`."""
        if self._figures is not None:
            self._figures.waited(key, size, end - start, end - issued_at)
        if self._trace is not None:
            self._trace.put((get_ident(), (call, size, start, 0, end, issued_at)))
        if self._flight is not None and handle is not None:
            self._flight.mark(handle, DONE, end)

    def step(self, samples: int = 0) -> None:
        """A step of the training, on `samples` samples of all ranks, ends here."""
        if self._figures is None:
            return
        with self._lock:
            now = now_ns()
            communicated = self._figures.communication_ns()
            if self._step_ns is not None:  # before the first step other things were done
                self._steps.append((now - self._step_ns, communicated - self._communicated_ns, samples))
            self._step_ns, self._communicated_ns = now, communicated
            if len(self._steps) >= self._config.every_steps:
                self._last = self._end_line()

    def _line_without_steps(self) -> None:
        with self._lock:
            if not self._steps and now_ns() - self._line_ns > _LINE_AFTER_S * 1e9:
                self._end_line()

    def _end_line(self, label: str | None = None) -> dict[str, Any]:
        """Write the figures since the last line and add them to the totals."""
        assert self._figures is not None
        now = now_ns()
        cells = self._figures.take()
        merge(self._totals, cells)
        found = {
            "kind": "figures",
            "label": label,
            "time_ns": now,
            "elapsed_ns": now - self._line_ns,
            "steps": self._steps,
            "rows": rows(cells, self._reasons),
        }
        if self._log is not None and (cells or self._steps):
            self._log.put(found)
        self._line_ns, self._steps = now, []
        self._communicated_ns -= communication_ns(cells.values())  # what the step so far has had of it
        return found

    def rows(self) -> tuple[list[dict[str, Any]], int]:
        """Return the figures since the start or the last reset, and the nanoseconds that they cover.

        Raises:
            CallError: if they are not kept.
        """
        if self._figures is None:
            raise CallError('no figures are kept: add "observe": {"log": true} to the "mcrdl" block')
        with self._lock:
            self._end_line()
            return rows(self._totals, self._reasons), now_ns() - self._began_ns

    def reset(self, label: str) -> None:
        """Write the figures so far, under a label such as "epoch 3", and count anew."""
        with self._lock:
            if self._figures is not None:
                self._end_line(label)
            self._totals.clear()
            self._began_ns = now_ns()

    def stragglers(self) -> list[dict[str, Any]]:
        """Return who comes late to which collectives (`stragglers.late`); every rank of the job calls this.

        Raises:
            CallError: if the calls are not kept.
            CallTimeoutError: if another rank does not come.
        """
        if self._calls is None:
            raise CallError('no arrivals are kept: add "observe": {"stragglers": true} to the "mcrdl" block')
        self._exchanges += 1
        key = f"stragglers/{self._exchanges}"
        own = self._calls.arrivals()
        return stragglers.late(exchange(self._store, key, self._rank, self._world_size, own, self._timeout_s))

    def events(self) -> list[tuple[str, float]]:
        """Return the figures of the line that the last step has ended, under the names of a monitor; else nothing."""
        last, self._last = self._last, None
        return [] if last is None else summary.events(last)

    def close(self) -> None:
        """Write what is left and close the files."""
        self._engine_steps.detach()
        if self._figures is not None:
            found, elapsed_ns = self.rows()
            if self._config.summary and self._rank == 0:
                summary.show(found, elapsed_ns)
        if self._log is not None and self._calls is not None:
            self._log.put({"kind": "arrivals", "rank": self._rank, "calls": self._calls.arrivals()})
        flight, self._flight = self._flight, None  # a call that ends later is no longer written down
        if flight is not None:
            flight.close()
        for writer in (self._log, self._trace):
            if writer is not None:
                writer.close()
                if writer.lost:
                    logger.warning(
                        "%d calls came faster than they could be written and are not in the files", writer.lost
                    )


class _Seen(Wrapped):
    """A Work whose end and whose waits are seen."""

    def __init__(
        self, work: Work, session: Session, call: Call, key: Key, size: int, issued_at: int, handle: Handle | None
    ) -> None:
        super().__init__(work)
        self._session = session
        self._seen = (call, key, size, issued_at, handle)
        self._handle = handle
        self._over = False

    def seen(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns; the session is told."""
        if self._over:
            return wait()
        start = now_ns()
        self._session.waits(self._handle)
        try:
            result = wait()
        except BaseException as error:
            self._session.failed(error, self._handle)
            raise
        self._over = True
        self._session.waited(*self._seen, start, now_ns())
        return result

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        done = self._work.is_completed()
        if done and not self._over:
            self._over = True
            now = now_ns()
            self._session.waited(*self._seen, now, now)
        return done
