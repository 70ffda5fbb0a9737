"""Throughput of real training for each backend: the plain deepspeed launcher on the examples, in turns.

Every backend runs once a round, the order rotated between rounds, with the same seed. Losses must agree between all
runs (bit for bit on 2 ranks; to 1e-4 on more, where backends add in different orders); else no ratio is shown and the
exit status is 1. A round's tokens/s is the tokens of a step by the median step time of the slowest rank; of DLRM, whose
unit is the sample, the rows' tokens_per_s_* are samples/s.

A codec after a config's name, such as auto+int8, adds "compression" to the config. Since codecs change losses, it is
the held-out loss of these runs that must agree, within 2 % of the first run's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.launch import free_port
from deepspeed_mcrdl.bench.results import write_json
from deepspeed_mcrdl.bench.workloads import WARM_UP_STEPS
from deepspeed_mcrdl.config import BLOCK_KEY, Compression
from deepspeed_mcrdl.errors import ConfigError, suggest
from deepspeed_mcrdl.hosts import rate
from deepspeed_mcrdl.machine import cores
from deepspeed_mcrdl.shipped import folder
from deepspeed_mcrdl.transforms.compression.policy import codec_of

# A script without a folder is part of the package.
WORKLOADS = {"moe": "moe_examples/train_moe.py", "gpt": "megatron_examples/train_gpt.py", "dlrm": "dlrm.py"}
_UNITS = {"moe": "tokens/s", "gpt": "tokens/s", "dlrm": "samples/s"}
STOCK = "stock"
_SHARED_MEMORY = Path("/dev/shm")
_LOSS_TOLERANCE = 1e-4
_CODED_LOSS_TOLERANCE = 0.02  # of held-out losses
_OUTPUT_LINES = 30
_GRACE_S = 5.0
_INTERRUPTED = 130  # what a shell reports for Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl bench train`."""
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="moe")
    parser.add_argument("--preset", choices=("small", "comm"), default="comm")
    parser.add_argument(
        "--backends",
        type=options.names,
        default="stock,gloo,mpi,auto",
        help="comma-separated: stock, or a config of the workload, with a codec or without: auto+int8",
    )
    parser.add_argument("--ranks", type=options.at_least(1), default=2)
    parser.add_argument(
        "--hosts", type=options.at_least(1), default=1, help="emulated hosts that the ranks are on: see mcrdl hosts"
    )
    parser.add_argument("--rate", type=rate, help="of the hosts' links, such as 1gbit (default: unlimited)")
    parser.add_argument("--rounds", type=options.at_least(1), default=3)
    parser.add_argument(
        "--steps", type=options.at_least(WARM_UP_STEPS + 1), default=60, help="of a run; the first are not counted"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="limit of one run")
    parser.add_argument("--json", type=options.output_file, metavar="FILE", help="write the rows here")
    parser.add_argument(
        "--plot", type=options.output_file, metavar="FILE", help="draw a bar chart (PNG); needs matplotlib"
    )


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0 if all losses agreed, 1 if not or if a run failed."""
    backends = _usable(args.backends, args.workload)
    if args.ranks % args.hosts:
        raise ConfigError(f"{args.ranks} ranks can't be shared out evenly among {args.hosts} hosts")
    if args.rate is not None and args.hosts == 1:
        raise ConfigError("--rate is of the links between hosts: give --hosts 2 or more")
    if args.plot:
        options.require_matplotlib()
    try:
        runs = _run_all(args, backends)
    except RunFailed as failure:
        print(f"mcrdl: error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mcrdl: interrupted", file=sys.stderr)
        return _INTERRUPTED
    summaries = [summarise(backend, runs[backend]) for backend in backends]
    plain = [run for backend in backends if not _parts(backend)[1] for run in runs[backend]]
    equal = losses_equal(plain) and held_out_near(summaries)
    rows = make_rows(args.workload, args.preset, summaries, equal)
    print_tables(rows, summaries)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("run", "json", "plot")}
        write_json(args.json, "train", rows, **settings, communication={s.backend: s.communication for s in summaries})
    if args.plot:
        _plot(rows, args.plot)
    if not equal:
        print("mcrdl: error: the losses differ between the runs, so their speeds can't be compared", file=sys.stderr)
    return 0 if equal else 1


class RunFailed(Exception):
    """A run ended with an error, without a report or not in time; the text has its last lines."""


@dataclass(frozen=True)
class Summary:
    """What the rounds of one backend came to.

    Attributes:
        backend: name of the config.
        world_size: number of ranks.
        tokens_per_s: of every round.
        share: median over the rounds of the communication's part of a step.
        final_loss: held-out loss after training.
        communication: one row an (operation, backend), each figure for a step of one rank.
    """

    backend: str
    world_size: int
    tokens_per_s: list[float]
    share: float
    final_loss: float
    communication: list[dict[str, Any]]


def summarise(backend: str, reports: Sequence[dict[str, Any]]) -> Summary:
    """Return what the `reports` of a backend's rounds (Recorder.write) come to."""
    return Summary(
        backend=backend,
        world_size=reports[0]["world_size"],
        tokens_per_s=[_tokens_per_s(report) for report in reports],
        share=statistics.median(map(_share, reports)),
        final_loss=reports[-1]["held_out"][1],
        communication=_communication(reports),
    )


def _tokens_per_s(report: dict[str, Any]) -> float:
    slowest: float = max(statistics.median(rank["step_seconds"]) for rank in report["ranks"])
    return float(report["tokens_per_step"]) / slowest


def _share(report: dict[str, Any]) -> float:
    shares: list[float] = [
        sum(row["seconds"] for row in rank["communication"]) / sum(rank["step_seconds"]) for rank in report["ranks"]
    ]
    return statistics.mean(shares)


def _communication(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ranks = [rank for report in reports for rank in report["ranks"]]
    steps = sum(len(rank["step_seconds"]) for rank in ranks)
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for rank in ranks:
        for row in rank["communication"]:
            total = sums.setdefault((row["operation"], row["backend"]), {"calls": 0, "bytes": 0, "seconds": 0})
            for key in total:
                total[key] += row[key]
    return [
        {"operation": operation, "backend": backend, **{f"{key}_per_step": total[key] / steps for key in total}}
        for (operation, backend), total in sorted(sums.items(), key=lambda item: -item[1]["seconds"])
    ]


def held_out_near(summaries: Sequence[Summary]) -> bool:
    """Return whether the held-out losses are within 2 % of the first one's."""
    first = summaries[0].final_loss
    return all(math.isclose(summary.final_loss, first, rel_tol=_CODED_LOSS_TOLERANCE) for summary in summaries)


def losses_equal(reports: Sequence[dict[str, Any]]) -> bool:
    """Return whether all runs had the same losses on every rank: exactly on 2 ranks, else to 1e-4."""
    if not reports:
        return True
    first, *others = [[rank["losses"] for rank in report["ranks"]] for report in reports]
    if reports[0]["world_size"] <= 2:
        return all(other == first for other in others)
    return all(
        math.isclose(a, b, rel_tol=_LOSS_TOLERANCE)
        for other in others
        for ours, theirs in zip(first, other, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def make_rows(workload: str, preset: str, summaries: Sequence[Summary], equal: bool) -> list[dict[str, Any]]:
    """Return one row a backend, with the keys that programs read; ratios only where the losses agree."""
    stock = next((summary for summary in summaries if summary.backend == STOCK), None)
    return [
        {
            "workload": workload,
            "preset": preset,
            "backend": summary.backend,
            "world_size": summary.world_size,
            "tokens_per_s_median": statistics.median(summary.tokens_per_s),
            "tokens_per_s_min": min(summary.tokens_per_s),
            "tokens_per_s_max": max(summary.tokens_per_s),
            "communication_share": summary.share,
            "ratio_to_stock": _ratio(summary, stock) if equal and stock is not None else None,
            "losses_equal": equal,
            "final_loss": summary.final_loss,
        }
        for summary in summaries
    ]


def _ratio(summary: Summary, other: Summary) -> float:
    """Return the median over the rounds of tokens/s by those of another config in the same round."""
    rounds = zip(summary.tokens_per_s, other.tokens_per_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in rounds)


def print_tables(rows: Sequence[dict[str, Any]], summaries: Sequence[Summary]) -> None:
    """Print throughput for each backend, and what carried how much."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(100, shutil.get_terminal_size().columns))
    first = rows[0]
    unit = _UNITS[first["workload"]]
    table = Table(title=f"{first['workload']}, preset {first['preset']}, {first['world_size']} ranks")
    for title in ("backend", unit, "min - max", "communication", "ratio to stock", "held-out loss"):
        table.add_column(title, justify="left" if title == "backend" else "right")
    for row in rows:
        ratio = row["ratio_to_stock"]
        table.add_row(
            row["backend"],
            f"{row['tokens_per_s_median']:.0f}",
            f"{row['tokens_per_s_min']:.0f} - {row['tokens_per_s_max']:.0f}",
            f"{row['communication_share']:.0%}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{row['final_loss']:.4f}",
        )
    console.print(table)
    if len(summaries[0].tokens_per_s) == 1:
        console.print("One round: where other programs run too it proves little. --rounds 3 takes medians of three.")
    stock = next((row for row in rows if row["backend"] == STOCK), None)
    if stock is not None and stock["losses_equal"]:
        bound = 1 / (1 - stock["communication_share"])
        console.print(f"If stock's communication took no time, the ratio would be {bound:.2f}.")
    for summary in summaries:
        name, codec = _parts(summary.backend)
        plain = next((other for other in summaries if codec and other.backend == name), None)
        if plain is not None and first["losses_equal"]:
            console.print(f"{summary.backend} is {_ratio(summary, plain):.2f} times as fast as {name}.")
    detail = Table(title="communication of one rank in one step")
    for title in ("config", "operation", "carried by", "calls", "bytes", "ms"):
        detail.add_column(title, justify="right" if title in ("calls", "bytes", "ms") else "left")
    for summary in summaries:
        for row in summary.communication:
            detail.add_row(
                summary.backend,
                row["operation"],
                row["backend"],
                f"{row['calls_per_step']:.1f}",
                f"{row['bytes_per_step']:.0f}",
                f"{1e3 * row['seconds_per_step']:.2f}",
            )
    console.print(detail)


def _usable(backends: list[str], workload: str) -> list[str]:
    for backend in backends:
        name, codec = _parts(backend)
        if not _config(workload, name).is_file():
            known = [path.stem.partition("_")[2] for path in folder("configs").glob(f"{workload}_*.json")]
            raise ConfigError(f'there is no config for "{name}".{suggest(name, known)}')
        if codec:
            if name == STOCK:
                raise ConfigError(f'"{backend}": stock DeepSpeed is without the plugin, which compresses')
            codec_of(Compression(codec=codec))
    if STOCK in backends and _needs_compiler() and len(backends) > 1:
        print(
            "stock DeepSpeed is left out: on CPUs it compiles a kernel at its start, and there is no C++ compiler here",
            file=sys.stderr,
        )
        return [backend for backend in backends if backend != STOCK]
    return backends


def _needs_compiler() -> bool:
    import torch

    return not torch.cuda.is_available() and shutil.which(os.environ.get("CXX", "c++")) is None


def script_path(workload: str) -> Path:
    """Return the training script of a workload."""
    place, _, name = WORKLOADS[workload].rpartition("/")
    return (folder(place) if place else Path(__file__).parent / "workloads") / name


def _parts(backend: str) -> tuple[str, str]:
    """Return the name of a config, and of the codec after it."""
    name, _, codec = backend.partition("+")
    return name, codec


def _config(workload: str, backend: str) -> Path:
    return folder("configs") / f"{workload}_{backend}.json"


def _run_all(args: argparse.Namespace, backends: list[str]) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
    total = args.rounds * len(backends)
    with tempfile.TemporaryDirectory(prefix="mcrdl-bench-") as scratch:
        for turn in range(total):
            number, place = divmod(turn, len(backends))
            backend = backends[(place + number) % len(backends)]
            _progress(f"run {turn + 1} of {total}: {backend}" + _first_start_note(backend, number))
            report = Path(scratch, f"{backend}-{number}.json")
            name, codec = _parts(backend)
            config = _config(args.workload, name)
            if codec:
                config = _with_codec(config, codec, Path(scratch, f"{args.workload}_{backend}.json"))
            _run_one(args, backend, config, report)
            runs[backend].append(json.loads(report.read_text(encoding="utf-8")))
    return runs


def _first_start_note(backend: str, number: int) -> str:
    import torch

    if backend != STOCK or number or torch.cuda.is_available():
        return ""
    return " (stock DeepSpeed compiles a kernel at its first start on a machine, which takes about a minute)"


def _with_codec(config: Path, codec: str, path: Path) -> Path:
    """Write the config with a codec to `path`."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings.setdefault(BLOCK_KEY, {})["compression"] = {"codec": codec}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def _run_one(args: argparse.Namespace, backend: str, config: Path, report: Path) -> None:
    port = free_port()
    command = [
        *_launcher(args, port),
        str(script_path(args.workload)),
        *("--deepspeed_config", str(config)),
        *("--preset", args.preset, "--steps", str(args.steps), "--report", str(report)),
    ]
    process = subprocess.Popen(
        command,
        env=_environment(args.ranks),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=args.timeout)
        failure = f"ended with status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        output = _end(process)
        failure = f"was not done within {args.timeout:g} s"
    except BaseException:
        _end(process)
        raise
    finally:
        for left in _SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)  # stock DeepSpeed leaves them, tens of megabytes for each rank
    if failure or not report.is_file():
        tail = "\n".join(output.splitlines()[-_OUTPUT_LINES:])
        raise RunFailed(f"the run with {backend} {failure or 'wrote no report'}; it printed last:\n{tail}")


def _launcher(args: argparse.Namespace, port: int) -> list[str]:
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    if args.hosts == 1:
        return [deepspeed, "--num_gpus", str(args.ranks), "--master_port", str(port)]
    limit = ("--rate", args.rate.text) if args.rate else ()
    size = ("--nodes", str(args.hosts), "--ranks-per-node", str(args.ranks // args.hosts))
    return [sys.executable, "-m", "deepspeed_mcrdl", "hosts", *size, *limit, "--", deepspeed]


def _end(process: subprocess.Popen[str]) -> str:
    """End a launcher and all that it started; returns what they printed.

    The launcher's own end says nothing of its ranks: what they print to is closed when the last of them is gone.
    """
    os.killpg(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def _environment(ranks: int) -> dict[str, str]:
    import torch

    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return environment


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    medians = [row["tokens_per_s_median"] for row in rows]
    spread = [
        [row["tokens_per_s_median"] - row["tokens_per_s_min"] for row in rows],
        [row["tokens_per_s_max"] - row["tokens_per_s_median"] for row in rows],
    ]
    bars = axes.bar([row["backend"] for row in rows], medians, yerr=spread, capsize=4, color="tab:blue")
    labels = ["" if row["ratio_to_stock"] is None else f"{row['ratio_to_stock']:.2f}x" for row in rows]
    axes.bar_label(bars, labels, label_type="center", color="white")
    axes.set_ylabel(f"{_UNITS[rows[0]['workload']]} (median, min to max)")
    axes.set_title(f"{rows[0]['workload']}, preset {rows[0]['preset']}, {rows[0]['world_size']} ranks")
    figure.savefig(path, dpi=150)
