"""The figures of a job's communication: for each operation, group, backend and size how often, how much, how long.

Sizes are powers of two, so that the number of rows is bounded whatever sizes a job has; bytes are summed exactly, so
that bandwidths are exact too. Latencies are counted in buckets that are at most a quarter of an octave wide.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import numpy.typing

from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import OPERATIONS, Operation

_SHORTEST_NS = 8
_MOST_FRESH = 512


# Operation, group, backend, and the power of two that is no less than the calls' bytes.
Key = tuple[Operation, Group, str, int]


class Cell:
    """Sums over the calls of one key.

    Attributes:
        calls: calls made.
        bytes: their sizes, as operations.py defines them.
        issued_ns: what the calling threads spent in them before they waited.
        waited_ns: what they spent waiting, in blocking calls and in wait().
        done: calls that were seen to be done.
        done_bytes: their sizes.
        latency_ns: what they took, from the call until they were seen to be done.
        latencies: bucket -> calls done in that time.
    """

    __slots__ = ("bytes", "calls", "done", "done_bytes", "fresh", "issued_ns", "latencies", "latency_ns", "waited_ns")

    def __init__(self) -> None:
        self.calls = self.bytes = self.issued_ns = self.waited_ns = self.done = self.done_bytes = self.latency_ns = 0
        self.latencies: dict[int, int] = {}
        # (bytes, issued, waited) of blocking calls that are not in the sums yet: summing many at once is cheaper.
        self.fresh: list[tuple[int, int, int]] = []

    def over(self, size: int, latency_ns: int) -> None:
        """Count the end of an asynchronous call."""
        self.done += 1
        self.done_bytes += size
        self.latency_ns += latency_ns
        bucket = bucket_of(latency_ns)
        self.latencies[bucket] = self.latencies.get(bucket, 0) + 1

    def settle(self) -> None:
        """Add the fresh calls to the sums."""
        if not self.fresh:
            return
        sizes, issued, waited = numpy.array(self.fresh, dtype=numpy.int64).T
        self.calls += len(self.fresh)
        self.done += len(self.fresh)
        self.fresh.clear()
        size, latencies = int(sizes.sum()), issued + waited
        self.bytes += size
        self.done_bytes += size
        self.issued_ns += int(issued.sum())
        self.waited_ns += int(waited.sum())
        self.latency_ns += int(latencies.sum())
        buckets, counts = numpy.unique(_buckets_of(latencies), return_counts=True)
        for bucket, calls in zip(buckets.tolist(), counts.tolist(), strict=True):
            self.latencies[bucket] = self.latencies.get(bucket, 0) + calls

    def add(self, other: Cell) -> None:
        """Add another cell's sums."""
        for name in ("calls", "bytes", "issued_ns", "waited_ns", "done", "done_bytes", "latency_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for bucket, calls in other.latencies.items():
            self.latencies[bucket] = self.latencies.get(bucket, 0) + calls


class Figures:
    """Cells by key; may be fed from several threads."""

    def __init__(self) -> None:
        self._cells: dict[Key, Cell] = {}
        self._lock = threading.Lock()

    def called(self, key: Key, size: int, issued_ns: int, waited_ns: int) -> bool:
        """Count a blocking call; return whether it is the first one of its key."""
        with self._lock:
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = Cell()
                cell.fresh.append((size, issued_ns, waited_ns))
                return True
            fresh = cell.fresh
            fresh.append((size, issued_ns, waited_ns))
            if len(fresh) >= _MOST_FRESH:
                cell.settle()
        return False

    def started(self, key: Key, size: int, issued_ns: int) -> bool:
        """Count an asynchronous call; return whether it is the first one of its key."""
        with self._lock:
            cell = self._cells.get(key)
            new = cell is None
            if cell is None:
                cell = self._cells[key] = Cell()
            cell.calls += 1
            cell.bytes += size
            cell.issued_ns += issued_ns
        return new

    def waited(self, key: Key, size: int, waited_ns: int, latency_ns: int) -> None:
        """Count the wait for an asynchronous call that has ended with it, and its latency."""
        with self._lock:
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = Cell()
            cell.waited_ns += waited_ns
            cell.over(size, latency_ns)

    def take(self) -> dict[Key, Cell]:
        """Return all cells and begin anew."""
        with self._lock:
            cells, self._cells = self._cells, {}
        for cell in cells.values():
            cell.settle()
        return cells

    def communication_ns(self) -> int:
        """Return what the calling threads have spent in calls and waits since the cells were taken."""
        with self._lock:
            return communication_ns(self._cells.values())


def communication_ns(cells: Iterable[Cell]) -> int:
    """Return what the calling threads have spent in calls and waits."""
    return sum(
        cell.issued_ns + cell.waited_ns + sum([issued_ns + waited_ns for _, issued_ns, waited_ns in cell.fresh])
        for cell in cells
    )


def merge(into: dict[Key, Cell], cells: Mapping[Key, Cell]) -> None:
    """Add `cells` to those of `into`."""
    for key, cell in cells.items():
        into.setdefault(key, Cell()).add(cell)


def bucket_of(latency_ns: int) -> int:
    """Return the bucket of a latency: four to an octave."""
    if latency_ns < _SHORTEST_NS:
        latency_ns = _SHORTEST_NS
    bits = latency_ns.bit_length()
    return bits << 2 | latency_ns >> bits - 3 & 3


def _buckets_of(latencies_ns: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.int64]:
    latencies_ns = numpy.maximum(latencies_ns, _SHORTEST_NS)
    bits = numpy.frexp(latencies_ns)[1].astype(numpy.int64)
    return bits << 2 | latencies_ns >> bits - 3 & 3


def middle_ns(bucket: int) -> float:
    """Return the middle of a bucket, which is within an eighth of every latency in it."""
    return ((4 | bucket & 3) + 0.5) * 2.0 ** ((bucket >> 2) - 3)


def percentile_ns(latencies: Mapping[int, int], part: float) -> float:
    """Return the latency that `part` (0 to 1) of the calls did not exceed; nan if there are none."""
    left = part * sum(latencies.values())
    for bucket in sorted(latencies):
        left -= latencies[bucket]
        if left <= 0:
            return middle_ns(bucket)
    return float("nan")


def rows(cells: Mapping[Key, Cell], why: Mapping[Key, str]) -> list[dict[str, Any]]:
    """Return `cells` as they stand in files, the costliest first.

    Times are nanoseconds; `group` is the group's number, `ranks` its size, `up_to` the largest size of the row in
    bytes; `latencies` holds (bucket, calls); `why` is the reason for the backend.
    """
    found = [
        {
            "operation": operation.name,
            "group": group.number,
            "ranks": group.size,
            "kind": group.kind,
            "backend": backend,
            "up_to": 1 << octave,
            "calls": cell.calls,
            "bytes": cell.bytes,
            "issued_ns": cell.issued_ns,
            "waited_ns": cell.waited_ns,
            "done": cell.done,
            "done_bytes": cell.done_bytes,
            "latency_ns": cell.latency_ns,
            "latencies": sorted(cell.latencies.items()),
            "why": why.get(key, ""),
        }
        for key, cell in cells.items()
        for operation, group, backend, octave in [key]
    ]
    return sorted(found, key=lambda row: -row["issued_ns"] - row["waited_ns"])


def bandwidths(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return algbw and busbw of a row in bytes per second, nan where no call was done."""
    if not row["latency_ns"]:
        return float("nan"), float("nan")
    algbw = row["done_bytes"] / row["latency_ns"] * 1e9
    return algbw, algbw * OPERATIONS[row["operation"]].busbw_factor(row["ranks"])


def together(rows: Iterable[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return `rows` summed over all that they do not share in `names`, the costliest first."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        into = sums.setdefault(tuple(row[name] for name in names), {name: row[name] for name in names})
        for name in ("calls", "bytes", "issued_ns", "waited_ns", "done", "done_bytes", "latency_ns"):
            into[name] = into.get(name, 0) + row[name]
        latencies = into.setdefault("latencies", {})
        for bucket, calls in row["latencies"]:
            latencies[bucket] = latencies.get(bucket, 0) + calls
    for row in sums.values():
        row["latencies"] = sorted(row["latencies"].items())
    return sorted(sums.values(), key=lambda row: -row["issued_ns"] - row["waited_ns"])
