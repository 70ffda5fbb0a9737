"""The figures as people read them: a table, the names of a monitor, and the lines of the log."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_mcrdl.observe.figures import bandwidths, percentile_ns, together

_COLUMNS = (
    "operation",
    "group",
    "backend",
    "up to",
    "calls",
    "MB",
    "issued ms",
    "waited ms",
    "p50 us",
    "p99 us",
    "algbw GB/s",
    "busbw GB/s",
    "share",
)


def line(entry: Mapping[str, Any]) -> str:
    """Return an entry as a line of the log."""
    return json.dumps(entry, separators=(",", ":")) + "\n"


def show(rows: Sequence[Mapping[str, Any]], elapsed_ns: int) -> None:
    """Print figures; the last column is the part of `elapsed_ns` that the calling threads spent in calls and waits."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"communication of this rank in {elapsed_ns / 1e9:.1f} s")
    for title in _COLUMNS:
        table.add_column(title, justify="left" if title in ("operation", "group", "backend") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row, elapsed_ns))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def cells(row: Mapping[str, Any], elapsed_ns: int) -> list[str]:
    """Return a row as text."""
    algbw, busbw = bandwidths(row)
    latencies = dict(row["latencies"])
    communication_ns = row["issued_ns"] + row["waited_ns"]
    return [
        row["operation"],
        f"{row['kind']} {row['group']} ({row['ranks']})",
        row["backend"],
        size_text(row["up_to"]) if row["bytes"] else "-",
        str(row["calls"]),
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['issued_ns'] / 1e6:.2f}",
        f"{row['waited_ns'] / 1e6:.2f}",
        *(f"{percentile_ns(latencies, part) / 1e3:.1f}" if latencies else "-" for part in (0.5, 0.99)),
        *(f"{value / 1e9:.3f}" if row["bytes"] and latencies else "-" for value in (algbw, busbw)),
        f"{communication_ns / elapsed_ns:.1%}" if elapsed_ns else "-",
    ]


def size_text(size: int) -> str:
    """Return a power of two in bytes as text, such as "64 KB"."""
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GB"


def events(line: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return a line of the log as the names and values of a monitor: means of its steps."""
    count = len(line["steps"]) or 1
    step_ns = sum(step[0] for step in line["steps"])
    communication_ns = sum(step[1] for step in line["steps"])
    found = [("Comm/ms_per_step", communication_ns / count / 1e6)]
    if step_ns:
        found.append(("Comm/share_of_step", communication_ns / step_ns))
    for row in together(line["rows"], "operation", "backend"):
        name = f"Comm/{row['operation']}/{row['backend']}"
        found += [
            (f"{name}/ms_per_step", (row["issued_ns"] + row["waited_ns"]) / count / 1e6),
            (f"{name}/calls_per_step", row["calls"] / count),
            (f"{name}/MB_per_step", row["bytes"] / count / 1e6),
        ]
        if row["latency_ns"] and row["bytes"]:
            found.append((f"{name}/algbw_GBps", row["done_bytes"] / row["latency_ns"]))
    return found
