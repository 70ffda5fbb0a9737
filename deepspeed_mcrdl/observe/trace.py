"""A timeline of every call, as Chrome's trace events: Perfetto opens each file, and what `mcrdl trace merge`
makes of all.

A rank is a process and each of its backends a track. A call has a slice, in it what it took to issue and to wait; an
asynchronous one has a slice for its issue, one for each wait, and one from its issue until it was seen to be done. What
happens inside a backend, such as when data moves, is not seen from here and not shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.observe.files import lines_of, ranks_in
from deepspeed_mcrdl.safety import Call

KIND = "trace"

# A call: (call, bytes, start, waiting since or 0, end); an asynchronous call's end: the same and when it was issued.
Entry = tuple[Call, int, int, int, int] | tuple[Call, int, int, int, int, int]


class Events:
    """Makes the lines of a rank's trace.

    Args:
        start: what the trace says of its rank: "rank", "host", "offset_ns" and more.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._rank: int = start["rank"]
        self._offset_ns: int = start["offset_ns"]
        self._tracks: dict[tuple[str, int], int] = {}
        self._about_group: dict[tuple[str, Group], str] = {}
        self._flights = 0
        self._head = [
            self._about("process_name", 0, {"name": f"rank {self._rank} ({start['host']})"}),
            self._about("process_sort_index", 0, {"sort_index": self._rank}),
            self._about("mcrdl", 0, dict(start)),
        ]

    def head(self) -> str:
        """Return the lines that a file begins with. A trace is an array whose end may be missing."""
        return "[\n" + "".join(self._head)

    def lines(self, entry: tuple[int, Entry]) -> str:
        """Return the lines of what a thread (its identifier goes before) has done."""
        thread, (call, size, start, since, end, *issued) = entry
        operation, group, backend, number = call
        track = self._tracks.get((backend, thread))
        if track is None:
            return self._begin_track(backend, thread) + self.lines(entry)
        about = self._about_group.get((backend, group))
        if about is None:
            told = json.dumps({"backend": backend, "group": group.name, "group_number": group.number})
            about = self._about_group[backend, group] = told[:-1]
        which = "sequence" if operation.collective else "peer"
        args = f'{about},"bytes":{size},"{which}":{"null" if number is None else number}}}'
        name = operation.name
        if issued:
            wait = self._slice(f"{name} wait", track, start, end, args) if end > start else ""
            return wait + self._flight(name, backend, issued[0], end, args)
        if not since:
            return self._slice(f"{name} issue", track, start, end, args)
        whole = self._slice(name, track, start, end, args)
        if since == end:
            return whole
        return whole + self._slice("issue", track, start, since, "{}") + self._slice("wait", track, since, end, "{}")

    def _begin_track(self, backend: str, thread: int) -> str:
        others = sum(other == backend for other, _ in self._tracks)
        track = self._tracks[backend, thread] = len(self._tracks) + 1
        name = self._about("thread_name", track, {"name": f"{backend}, thread {others + 1}" if others else backend})
        self._head.append(name)  # of the files that follow, too
        return name

    def _about(self, name: str, track: int, args: dict[str, Any]) -> str:
        event = {"ph": "M", "name": name, "pid": self._rank, "tid": track, "args": args}
        return json.dumps(event, separators=(",", ":")) + ",\n"

    # By hand, not by json: there are several to a call, and who writes them holds up who computes.

    def _slice(self, name: str, track: int, start: int, end: int, args: str) -> str:
        ts, dur = (start + self._offset_ns) / 1e3, (end - start) / 1e3
        return (
            f'{{"ph":"X","name":"{name}","cat":"call","pid":{self._rank},"tid":{track},'
            f'"ts":{ts:.3f},"dur":{dur:.3f},"args":{args}}},\n'
        )

    def _flight(self, name: str, backend: str, start: int, end: int, args: str) -> str:
        self._flights += 1
        event = (
            f'"name":"{name} in flight","cat":"{backend}","pid":{self._rank},"tid":0,'
            f'"id2":{{"local":"{self._flights}"}},"ts":'
        )
        first, last = (start + self._offset_ns) / 1e3, (end + self._offset_ns) / 1e3
        return f'{{"ph":"b",{event}{first:.3f},"args":{args}}},\n{{"ph":"e",{event}{last:.3f}}},\n'


def events_of(folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank's trace; what the end of the job has cut off is left out."""
    for line in lines_of(folder, KIND, rank):
        if line.startswith("{"):
            yield json.loads(line.rstrip(",\n"))


def merge(folder: Path, output: Path) -> tuple[int, int]:
    """Join the traces of all ranks in `folder`, in rank 0's time from the first event on; return (ranks, events).

    Raises:
        ConfigError: if there are none, or `output` can't be written.
    """
    ranks = ranks_in(folder, KIND)
    events = [event for rank in ranks for event in events_of(folder, rank)]
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    events.sort(key=lambda event: event.get("ts", -1))
    try:
        with output.open("w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file)
    except OSError as error:
        raise ConfigError(f"the trace can't be written: {error}") from None
    return len(ranks), len(events)
