"""`mcrdl report run DIR`: one page on a job's communication, from the files that its ranks have left in a folder.

The page needs nothing but itself: no network, no scripts. Figures are means over the ranks unless they say whose they
are.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.observe import stragglers, trace
from deepspeed_mcrdl.observe.figures import bandwidths, percentile_ns, together
from deepspeed_mcrdl.observe.files import lines_of, ranks_in
from deepspeed_mcrdl.observe.summary import size_text

_WIDTH = 860  # of a drawing, in its own units
_MOST_POINTS = 430
_MOST_SLICES = 600  # of a lane
_MOST_ROWS = 40
_MOST_LANES = 24
_EXCERPT_NS = 50_000_000  # where there are no steps
_STEPS_SHOWN = 2
_COLOURS = ("shm", "mpi", "gloo", "nccl")


class Run(NamedTuple):
    """What the logs of a run say: each rank's start, rows, steps and arrivals, and rank 0's time."""

    starts: dict[int, dict[str, Any]]
    rows: dict[int, list[dict[str, Any]]]
    steps: dict[int, list[tuple[int, int, int]]]
    arrivals: dict[int, list[Any]]
    elapsed_ns: int


class Box(NamedTuple):
    """A rectangle of a drawing: place, size, style, and what it says when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    style: str
    text: str


def read_run(folder: Path) -> Run:
    """Read the logs in `folder`.

    Raises:
        ConfigError: if there are none.
    """
    run = Run({}, {}, {}, {}, 0)
    elapsed_ns = 0
    for rank in ranks_in(folder, "log"):
        run.rows[rank], run.steps[rank] = [], []
        for line in map(json.loads, lines_of(folder, "log", rank)):
            if line["kind"] == "start":
                run.starts[rank] = line
            elif line["kind"] == "arrivals":
                run.arrivals[rank] = line["calls"]
            else:
                run.rows[rank] += line["rows"]
                run.steps[rank] += map(tuple, line["steps"])
                elapsed_ns += line["elapsed_ns"] if rank == min(run.rows) else 0
    return run._replace(elapsed_ns=elapsed_ns)


def write_page(folder: Path, output: Path) -> None:
    """Write the page on the run in `folder`.

    Raises:
        ConfigError: if there is no log, or `output` can't be written.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template("page.html").render(**content(folder))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page can't be written: {error}") from None


def content(folder: Path) -> dict[str, Any]:
    """Return what the page shows, by the names of its template."""
    run = read_run(folder)
    ranks = sorted(run.rows)
    first = run.steps[ranks[0]]
    every_row = [row for rank in ranks for row in run.rows[rank]]
    backends = list(dict.fromkeys(row["backend"] for row in together(every_row, "backend")))
    return {
        "folder": str(folder),
        "start": next(iter(run.starts.values()), {}),
        "hosts": sorted({start["host"] for start in run.starts.values()}),
        "ranks": ranks,
        "backends": [(name, style_of(name)) for name in backends],
        "tiles": _tiles(run, every_row, first),
        "steps": _step_chart(first),
        "by_operation": _bars(every_row, len(ranks), "operation", lambda name: str(name)),
        "by_size": _histogram(every_row, len(ranks)),
        "latencies": _latencies(every_row, len(ranks)),
        "routes": _routes(every_row),
        "by_rank": _by_rank(run),
        "late": stragglers.late([run.arrivals.get(rank, []) for rank in range(max(ranks) + 1)]),
        "timeline": _timeline(folder, first),
        "width": _WIDTH,
    }


def style_of(backend: str) -> str:
    """Return the class of a backend's colour; a pair of backends has that of its first, with a codec or without."""
    name = backend.partition(" ")[0].partition("+")[0]
    return name if name in _COLOURS else "other"


def _communication_ns(rows: Iterable[Mapping[str, Any]]) -> int:
    return sum(row["issued_ns"] + row["waited_ns"] for row in rows)


def _tiles(run: Run, rows: Sequence[Any], steps: Sequence[tuple[int, int, int]]) -> list[tuple[str, str, str]]:
    """Return (figure, unit, what it is)."""
    ranks = len(run.rows)
    total_s = sum(step[0] for step in steps) / 1e9
    tiles = []
    if total_s:
        samples = sum(step[2] for step in steps)
        if samples:
            tiles.append((f"{samples / total_s:.4g}", "samples/s", "throughput of all ranks"))
        tiles.append(
            (f"{statistics.median(step[0] for step in steps) / 1e6:.4g}", "ms", f"median of {len(steps)} steps")
        )
        tiles.append(
            (f"{sum(step[1] for step in steps) / total_s / 1e7:.1f}", "%", "of a step in communication, rank 0")
        )
    tiles.append(
        (f"{_communication_ns(rows) / ranks / 1e9:.4g}", "s", f"in communication, in {run.elapsed_ns / 1e9:.4g} s")
    )
    tiles.append((f"{sum(row['calls'] for row in rows) / ranks:,.0f}", "", "calls of a rank"))
    tiles.append((_bytes_text(sum(row["bytes"] for row in rows) / ranks), "", "in them"))
    return tiles


def _bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _step_chart(steps: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
    """Return the lines of the steps' length and of their time in communication."""
    if len(steps) < 2:
        return None
    width = max(1, -(-len(steps) // _MOST_POINTS))
    parts = [steps[at : at + width] for at in range(0, len(steps), width)]
    lengths, shares = ([statistics.mean(step[which] for step in part) / 1e6 for part in parts] for which in (0, 1))
    # One slow step, such as the first of an epoch, must not press all others flat.
    top, height, left = sorted(lengths)[int(0.98 * (len(lengths) - 1))] * 1.25, 190, 52

    def line(values: Sequence[float]) -> str:
        across = (_WIDTH - left) / max(1, len(values) - 1)
        return " ".join(
            f"{left + at * across:.1f},{height - min(v / top, 1) * height:.1f}" for at, v in enumerate(values)
        )

    base = f"{_WIDTH},{height} {left},{height}"
    ticks = [(height - height * value / top, f"{value:.3g}") for value in _round_steps(top)]
    return {
        "length": line(lengths),
        "share": f"{line(shares)} {base}",
        "ticks": ticks,
        "height": height,
        "left": left,
        "count": len(steps),
        "width": width,
    }


def _round_steps(top: float) -> Iterator[float]:
    """Yield round numbers from 0 to `top`."""
    size = 10.0 ** math.floor(math.log10(top))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2) if top / (size * factor) <= 5)
    for count in range(int(top / step) + 1):
        yield count * step


def _bars(
    rows: Sequence[Any], ranks: int, name: str, text: Callable[[Any], str], order: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return a bar for each value of `name`, in parts by backend: ms of a rank, issued darker than waited.

    They stand in `order`, or else the longest first.
    """
    sums = together(rows, name, "backend")
    totals = dict.fromkeys(order or [row[name] for row in sums], 0)
    for row in sums:
        totals[row[name]] += row["issued_ns"] + row["waited_ns"]
    order = order or sorted(totals, key=lambda key: -totals[key])
    longest = max(totals.values(), default=1) or 1
    left, right, height = 190, 130, 30
    boxes, labels = [], []
    for place, key in enumerate(order):
        x, y = float(left), place * height + 4.0
        for row in sums:
            if row[name] == key:
                for part, kind in (("issued_ns", ""), ("waited_ns", " waited")):
                    width = row[part] / longest * (_WIDTH - left - right)
                    said = f"{text(key)} by {row['backend']}: {row[part] / ranks / 1e6:.2f} ms {part[:-3]}"
                    boxes.append(Box(x, y, width, height - 8.0, style_of(row["backend"]) + kind, said))
                    x += width
        share = totals[key] / (sum(totals.values()) or 1)
        labels.append((y + height / 2, text(key), x + 8, f"{totals[key] / ranks / 1e6:,.1f} ms, {share:.0%}"))
    return {"boxes": boxes, "labels": labels, "left": left, "height": len(order) * height}


def _histogram(rows: Sequence[Any], ranks: int) -> dict[str, Any]:
    """Return columns of the calls of a rank by size, in parts by backend."""
    sums = together([row for row in rows if row["bytes"]], "up_to", "backend")
    sizes = sorted({row["up_to"] for row in sums})
    totals = {size: sum(row["calls"] for row in sums if row["up_to"] == size) for size in sizes}
    highest = max(totals.values(), default=1)
    height, left, top = 170, 52, 18
    across = min(90.0, (_WIDTH - left) / max(1, len(sizes)))
    boxes, labels = [], []
    for place, size in enumerate(sizes):
        x, y = left + place * across + 2, float(height)
        for row in sums:
            if row["up_to"] == size:
                part = row["calls"] / highest * (height - top)
                y -= part
                said = f"up to {size_text(size)} by {row['backend']}: {row['calls'] / ranks:,.0f} calls"
                moved = _bytes_text(row["bytes"] / ranks)
                boxes.append(Box(x, y, across - 4, part, style_of(row["backend"]), f"{said}, {moved}"))
        calls = totals[size] / ranks
        labels.append((x + across / 2 - 2, size_text(size), y - 5, f"{calls:,.0f}" if calls >= 1 else f"{calls:.1f}"))
    return {"boxes": boxes, "labels": labels, "height": height, "left": left}


def _latencies(rows: Sequence[Any], ranks: int) -> list[dict[str, Any]]:
    """Return the rows of the table of latencies, with a bar from p50 to p99 on one scale of powers of ten."""
    found: list[dict[str, Any]] = []
    for row in together(rows, "operation", "ranks", "backend", "up_to")[:_MOST_ROWS]:
        counts = dict(row["latencies"])
        if not counts:
            continue
        p50, p90, p99 = (percentile_ns(counts, part) / 1e3 for part in (0.5, 0.9, 0.99))
        algbw, busbw = bandwidths(row)
        found.append(
            {
                "operation": row["operation"],
                "ranks": row["ranks"],
                "backend": row["backend"],
                "style": style_of(row["backend"]),
                "size": size_text(row["up_to"]) if row["bytes"] else "",
                "calls": f"{row['calls'] / ranks:,.0f}",
                "percentiles": [_us(value) for value in (p50, p90, p99)],
                "bandwidths": [_gigabytes(value) if row["bytes"] else "" for value in (algbw, busbw)],
                "ends": (p50, p99),
            }
        )
    if found:
        low, high = min(row["ends"][0] for row in found), max(row["ends"][1] for row in found)
        for row in found:
            row["bar"] = tuple(_decades(end, low) / (_decades(high, low) or 1) * 100 for end in row["ends"])
    return found


def _decades(value: float, low: float) -> float:
    return math.log10(value / low)


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.3f}" if value >= 1e6 or not value else "< 0.001"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _routes(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return for each operation and kind of group which sizes go where, and why."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["operation"], row["kind"], row["up_to"])):
        key = (row["operation"], row["kind"], row["ranks"], row["backend"], row["why"])
        into = found.setdefault(key, {"sizes": (row["up_to"], row["up_to"]), "calls": 0, "bytes": 0})
        into["sizes"] = (min(into["sizes"][0], row["up_to"]), max(into["sizes"][1], row["up_to"]))
        into["calls"] += row["calls"]
        into["bytes"] += row["bytes"]
    routes = []
    for (operation, kind, ranks, backend, why), into in found.items():
        first, last = into["sizes"]
        sizes = f"up to {size_text(last)}" if first == last else f"{size_text(first)} to {size_text(last)}"
        about = {"operation": operation, "kind": kind, "ranks": ranks, "backend": backend, "why": why}
        routes.append({**about, "style": style_of(backend), "sizes": sizes if into["bytes"] else ""})
    return routes


def _by_rank(run: Run) -> dict[str, Any]:
    """Return a bar of communication for each rank. A rank that waits less than the others is one they wait for."""
    ranks = sorted(run.rows)[:_MOST_ROWS]
    rows = [{**row, "rank": rank} for rank in ranks for row in run.rows[rank]]
    return _bars(rows, 1, "rank", lambda rank: f"rank {rank}", ranks)


def _timeline(folder: Path, steps: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
    """Return an excerpt of the traces, from the middle of the run: a lane for each rank and backend."""
    try:
        ranks = ranks_in(folder, trace.KIND)
    except ConfigError:
        return None
    slices: list[tuple[int, dict[str, Any]]] = []
    for rank in ranks:
        for event in trace.events_of(folder, rank):
            if event["ph"] == "X":
                slices.append((rank, event))
    calls = [event for _, event in slices if event["args"]]
    if not calls:
        return None
    length_us = (statistics.median(step[0] for step in steps) * _STEPS_SHOWN if steps else _EXCERPT_NS) / 1e3
    middle = sorted(event["ts"] for event in calls)[len(calls) // 2]
    first, last = middle, middle + length_us
    backends = {(rank, event["tid"]): event["args"]["backend"] for rank, event in slices if event["args"]}
    inside = [(rank, e) for rank, e in slices if e["ts"] < last and e["ts"] + e["dur"] > first]
    lanes = sorted({(rank, event["tid"]) for rank, event in inside}, key=lambda lane: (lane[0], backends[lane]))
    lanes = lanes[:_MOST_LANES]
    left, height = 110, 30
    scale = (_WIDTH - left) / length_us
    boxes: list[Box] = []
    drawn = dict.fromkeys(lanes, 0)
    in_parts = {(rank, e["tid"], e["ts"]) for rank, e in inside if e["name"] == "issue"}
    for rank, event in inside:
        lane = (rank, event["tid"])
        if lane not in drawn or event["name"] == "wait" or drawn[lane] >= _MOST_SLICES:
            continue
        drawn[lane] += 1
        start, end = max(event["ts"], first), min(event["ts"] + event["dur"], last)
        x, width = left + (start - first) * scale, max((end - start) * scale, 0.8)
        args = event["args"]
        waited = event["name"].endswith(" wait") or (args and (*lane, event["ts"]) in in_parts)
        style = style_of(backends[lane]) + (" waited" if waited else "")
        said = f"{event['name']} {_us(event['dur'])} us"
        if args:
            said += f", {args['bytes']} bytes on {args['group']} by {args['backend']}, rank {rank}"
        boxes.append(Box(x, lanes.index(lane) * height + 4.0, width, height - 8.0, style, said))
    names = [(place * height + height / 2, f"rank {lane[0]}, {backends[lane]}") for place, lane in enumerate(lanes)]
    ticks = [(left + value * 1e3 * scale, f"{value:.3g} ms") for value in _round_steps(length_us / 1e3)]
    return {"boxes": boxes, "names": names, "ticks": ticks, "left": left, "height": len(lanes) * height}
