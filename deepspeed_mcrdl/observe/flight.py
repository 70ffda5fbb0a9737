"""A flight recorder: the last calls of each rank, in a file that is mapped into memory.

A call is written down when it is made and marked when it has ended, by stores into the map: no system call, and the
file is true whatever becomes of the process, a rank that hangs or was killed included. `mcrdl flight show` reads the
files of all ranks together. When a call times out or is found not to fit, or the process gets SIGUSR1, the calls and
the stacks of all threads are kept beside it.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.observe.clock import now_ns
from deepspeed_mcrdl.observe.files import path_of, ranks_in
from deepspeed_mcrdl.operations import OPERATIONS, Operation
from deepspeed_mcrdl.safety import Call

KIND = "flight"
DUMP = "flight-dump"

CALLING, IN_FLIGHT, WAITING, DONE, FAILED = range(1, 6)
_WORDS = {CALLING: "in the call", IN_FLIGHT: "in flight", WAITING: "in wait()", DONE: "done", FAILED: "failed"}

_MAGIC = b"MCRDLFR1"
_HEAD = struct.Struct("<8sII")  # magic, number of records, bytes of text
_TEXT_BYTES = 1 << 20  # lines of JSON: about the rank, then each kind of call; sparse
# number of the call, start, number in its group (-1: none), bytes, end, state, kind; a number of 0: no record yet
_RECORD = struct.Struct("<QQqQQHH4x")
_START = struct.Struct("<QQqQQHH")
_END = struct.Struct("<QH")
_END_AT = 32
_UNKNOWN_KIND = 0

Handle = tuple[int, int]


class Recorder:
    """Writes down the calls of this rank; may be fed from several threads.

    Args:
        folder: the folder of the run.
        calls: how many are kept.
        start: about the rank: "rank", "world_size", "host", "date", "offset_ns".
    """

    def __init__(self, folder: Path, calls: int, start: Mapping[str, Any]) -> None:
        self._folder, self._rank, self._calls = folder, start["rank"], calls
        self._path = path_of(folder, KIND, self._rank)
        self._records_at = _HEAD.size + _TEXT_BYTES
        size = self._records_at + calls * _RECORD.size
        with self._path.open("w+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        _HEAD.pack_into(self._map, 0, _MAGIC, calls, _TEXT_BYTES)
        self._text_at = _HEAD.size
        self._kinds: dict[tuple[Operation, Group, str], int] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._last = 0
        self._tell({**start, "pid": os.getpid()})
        self._tell(None)  # the kind of calls for which there is no room
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR1, self._on_signal)

    def begin(self, call: Call, size: int, start: int) -> Handle:
        """A call is made; return what `mark` is given later."""
        operation, group, backend, in_group = call
        kind = self._kinds.get((operation, group, backend))
        if kind is None:
            kind = self._kind(operation, group, backend)
        self._last = number = next(self._numbers)
        at = self._records_at + number % self._calls * _RECORD.size
        _START.pack_into(self._map, at, number, start, -1 if in_group is None else in_group, size, 0, CALLING, kind)
        return number, at

    def mark(self, handle: Handle, state: int, end: int = 0) -> None:
        """A call has come to `state`, and to its end at `end`; later calls may have taken its place."""
        number, at = handle
        if self._last - number < self._calls:
            _END.pack_into(self._map, at + _END_AT, end, state)

    def _kind(self, operation: Operation, group: Group, backend: str) -> int:
        with self._lock:
            about = {
                "operation": operation.name,
                "backend": backend,
                "group": group.number,
                "name": group.name,
                "ranks": group.ranks,
            }
            kind = 1 + len(self._kinds) if self._tell(about) else _UNKNOWN_KIND
            return self._kinds.setdefault((operation, group, backend), kind)

    def _tell(self, about: Any) -> bool:
        text = json.dumps(about).encode() + b"\n"
        if self._text_at + len(text) > self._records_at:
            return False
        self._map[self._text_at : self._text_at + len(text)] = text
        self._text_at += len(text)
        return True

    def dump(self, reason: str) -> None:
        """Keep the calls and all threads' stacks as they are now, beside the record that goes on."""
        path = path_of(self._folder, DUMP, self._rank)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        told = {
            "reason": reason,
            "time_ns": now_ns(),
            "calls": [call._asdict() for call in read(self._path).calls],
            "stacks": {
                names.get(thread, str(thread)): traceback.format_stack(frame)
                for thread, frame in sys._current_frames().items()
            },
        }
        try:
            path.write_text(json.dumps(told, indent=1), encoding="utf-8")
            logger.warning("the last calls are in %s (%s)", path, reason)
        except OSError as error:
            logger.warning("the last calls could not be written to %s: %s", path, error)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.dump("SIGUSR1")
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        """Let go of the file and of the signal."""
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._previous)
        self._map.close()


class Recorded(NamedTuple):
    """A call as a file tells of it; times are nanoseconds of rank 0's clock.

    Attributes:
        operation: name of the operation.
        backend: name of the backend.
        group: number of the group.
        group_name: its name.
        ranks: its global ranks.
        number: how manieth collective of the group; of a message the peer, None for any.
        bytes: its size.
        start: when it was made.
        end: when it ended; None: it has not.
        state: how far it has come, in words.
    """

    operation: str
    backend: str
    group: int
    group_name: str
    ranks: tuple[int, ...]
    number: int | None
    bytes: int
    start: int
    end: int | None
    state: str

    @property
    def collective(self) -> bool:
        """Whether every rank of the group takes part."""
        return OPERATIONS[self.operation].collective

    def __str__(self) -> str:
        which = f"#{self.number}" if self.collective else f"peer {'any' if self.number is None else self.number}"
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return (
            f"{self.operation} {which} on group '{self.group_name}' (ranks {ranks}) by {self.backend}, "
            f"{self.bytes} bytes"
        )


class Flight(NamedTuple):
    """What a rank's file says: about the rank, its last calls, the oldest first, and whether these are all."""

    about: dict[str, Any]
    calls: list[Recorded]
    all_calls: bool


def read(path: Path) -> Flight:
    """Read a rank's file, of a process that runs or has ended in whatever way.

    Raises:
        ConfigError: if it is no flight record.
    """
    data = path.read_bytes()
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ConfigError(f"{path} is no flight record")
    _, calls, text_bytes = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + text_bytes].rstrip(b"\0")
    about, *kinds = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    places = (_RECORD.unpack_from(data, _HEAD.size + text_bytes + place * _RECORD.size) for place in range(calls))
    records = sorted(record for record in places if record[0])
    found = []
    for _, start, number, size, end, state, kind in records:
        of = kinds[kind] if kind < len(kinds) else None
        if of is not None:
            found.append(
                Recorded(
                    operation=of["operation"],
                    backend=of["backend"],
                    group=of["group"],
                    group_name=of["name"],
                    ranks=tuple(of["ranks"]),
                    number=None if number < 0 else number,
                    bytes=size,
                    start=start + about["offset_ns"],
                    end=end + about["offset_ns"] if end else None,
                    state=_WORDS.get(state, "torn"),
                )
            )
    return Flight(about, found, not records or records[0][0] == 1)


def show(folder: Path, last: int = 0) -> Iterator[str]:
    """Yield lines that say which call each rank is in, who is missing there, and each rank's `last` calls.

    Raises:
        ConfigError: if the folder has no flight records.
    """
    flights = {rank: read(path_of(folder, KIND, rank)) for rank in ranks_in(folder, KIND)}
    newest = max((max(call.start, call.end or 0) for flight in flights.values() for call in flight.calls), default=0)
    if any(_alive(flight) for flight in flights.values()):
        newest = max(newest, now_ns() + next(f.about["offset_ns"] for f in flights.values() if _alive(f)))
    for rank, flight in flights.items():
        alive = _alive(flight)
        condition = "" if alive is None else ", running" if alive else ", has ended"
        yield f"rank {rank} ({flight.about['host']}, process {flight.about['pid']}{condition})"
        stuck = [call for call in flight.calls if call.end is None]
        for call in stuck:
            yield f"  {call.state} for {(newest - call.start) / 1e9:.1f} s: {call}"
            yield f"    {_explained(rank, call, flights)}"
        if not stuck:
            done = flight.calls[-1] if flight.calls else None
            since = f"{(newest - (done.end or 0)) / 1e9:.1f} s ago: {done} ({done.state})" if done else "none"
            yield f"  in no call; its last ended {since}" if done else "  has made no call"
        dump = path_of(folder, DUMP, rank)
        if dump.is_file():
            yield f"  calls and stacks at {json.loads(dump.read_text(encoding='utf-8'))['reason']}: {dump}"
        for call in flight.calls[-last:] if last else ():
            took = "" if call.end is None else f" {(call.end - call.start) / 1e3:.0f} us"
            yield f"    {(call.start - newest) / 1e9:+.6f} s {call}: {call.state}{took}"


def _explained(rank: int, call: Recorded, flights: Mapping[int, Flight]) -> str:
    if not call.collective:
        peers = [call.number] if call.number is not None else [peer for peer in call.ranks if peer != rank]
        return "; ".join(f"rank {peer} {_doing(peer, flights)}" for peer in peers)
    said = []
    for member in call.ranks:
        if member == rank:
            continue
        own = [c for c in _of(member, flights) if c.group == call.group and c.collective]
        there = next((c for c in own if c.number == call.number), None)
        if not own and member in flights and not flights[member].all_calls:
            said.append(f"rank {member} has made too many calls since to tell; it {_doing(member, flights)}")
        elif there is None and max((c.number or 0 for c in own), default=0) < (call.number or 0):
            said.append(f"rank {member} is missing: it {_doing(member, flights)}")
        elif there is not None and (there.operation, there.bytes) != (call.operation, call.bytes):
            said.append(f"rank {member} has made another call there: {there}")
    return "; ".join(said) or "all of its ranks have come, so the backend or its network is stuck"


def _of(rank: int, flights: Mapping[int, Flight]) -> list[Recorded]:
    return flights[rank].calls if rank in flights else []


def _doing(rank: int, flights: Mapping[int, Flight]) -> str:
    if rank not in flights:
        return "has no file here"
    stuck = [call for call in flights[rank].calls if call.end is None and call.state != _WORDS[IN_FLIGHT]]
    if stuck:
        return f"is {stuck[-1].state}: {stuck[-1]}"
    calls = flights[rank].calls
    ended = "has ended" if _alive(flights[rank]) is False else "is in no call"
    return f"{ended}, after {calls[-1]}" if calls else f"{ended} and has made none"


def _alive(flight: Flight) -> bool | None:
    """Return whether the rank's process runs; None: it is on another host."""
    if flight.about["host"] != socket.gethostname():
        return None
    try:
        os.kill(flight.about["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
