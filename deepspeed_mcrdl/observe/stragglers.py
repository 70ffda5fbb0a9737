"""Which rank comes last to the collectives, and how late, from the times at which the ranks called them.

A collective call has one number in its group on all ranks, so the ranks' calls are compared one by one. A rank is late
by the time from the first rank's call to its own.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed_mcrdl.groups import Group

_KEPT = 4096

# Of one collective: operation, number of the group, size of the group, number of the call, time in nanoseconds.
Arrival = tuple[str, int, int, int, int]


class Calls:
    """The last collectives of this rank."""

    def __init__(self, offset_ns: int) -> None:
        self._offset_ns = offset_ns
        self._calls: deque[tuple[str, Group, int, int]] = deque(maxlen=_KEPT)

    def add(self, operation: str, group: Group, number: int, time_ns: int) -> None:
        """This rank calls the collective `number` of `group`."""
        self._calls.append((operation, group, number, time_ns))

    def arrivals(self) -> list[Arrival]:
        """Return them in rank 0's time; groups of one rank are left out."""
        return [
            (operation, group.number, group.size, number, time_ns + self._offset_ns)
            for operation, group, number, time_ns in tuple(self._calls)
            if group.size > 1
        ]


def late(by_rank: Sequence[Iterable[Sequence[Any]]]) -> list[dict[str, Any]]:
    """Return for each operation and group which rank is late, the worst first.

    Args:
        by_rank: each rank's arrivals.

    Returns:
        Rows of "operation", "group" (its number), "ranks" (its size), "calls" that all its ranks have made, "slowest"
        (the rank that is late by most in all), "late_us" (its mean), "most_us" (its worst), "last" (the part of the
        calls to which it came last).
    """
    times: dict[tuple[str, int, int, int], dict[int, int]] = {}
    for rank, arrivals in enumerate(by_rank):
        for operation, group, size, number, time_ns in arrivals:
            times.setdefault((operation, group, size, number), {})[rank] = time_ns
    lateness: dict[tuple[str, int, int], dict[int, list[int]]] = {}
    last: dict[tuple[str, int, int], Counter[int]] = {}
    for (operation, group, size, _), came in times.items():
        if len(came) == size:
            first = min(came.values())
            by = lateness.setdefault((operation, group, size), {})
            for rank, time_ns in came.items():
                by.setdefault(rank, []).append(time_ns - first)
            last.setdefault((operation, group, size), Counter())[max(came, key=lambda rank: came[rank])] += 1
    rows = []
    for (operation, group, size), by in lateness.items():
        slowest = max(by, key=lambda rank: sum(by[rank]))
        calls = len(by[slowest])
        rows.append(
            {
                "operation": operation,
                "group": group,
                "ranks": size,
                "calls": calls,
                "slowest": slowest,
                "late_us": sum(by[slowest]) / calls / 1e3,
                "most_us": max(by[slowest]) / 1e3,
                "last": last[operation, group, size][slowest] / calls,
            }
        )
    return sorted(rows, key=lambda row: -row["late_us"] * row["calls"])


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print what `late` returns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="who comes last to the collectives")
    for title in ("operation", "group", "ranks", "calls", "slowest rank", "late by us", "at most us", "comes last in"):
        table.add_column(title, justify="left" if title == "operation" else "right")
    for row in rows:
        counts = [str(row[name]) for name in ("group", "ranks", "calls", "slowest")]
        table.add_row(row["operation"], *counts, f"{row['late_us']:.0f}", f"{row['most_us']:.0f}", f"{row['last']:.0%}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
