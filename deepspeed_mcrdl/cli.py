"""The mcrdl command: argument parsing only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_mcrdl import __version__
from deepspeed_mcrdl.errors import ConfigError, MCRDLError, rank_label


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 right, 1 a result was wrong or a run failed, 2 a user's mistake."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(measures=argv[:1] in (["bench"], ["tune"])).parse_args(argv)
    try:
        status: int = args.run(args)
    except MCRDLError as error:
        print(f"mcrdl: error: {rank_label()}{error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    return status


class _Parser(argparse.ArgumentParser):
    """One whose commands say themselves, with their own usage, what they don't know."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser(measures: bool) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="mcrdl", description="Mix-and-match communication backends for DeepSpeed (MCR-DL)."
    )
    parser.add_argument("--version", action="version", version=f"mcrdl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="one line for each backend: usable or why not, and versions")
    report.add_argument("--routes", action="store_true", help="which backend carries which operation and size, and why")
    report.add_argument(
        "of",
        nargs="*",
        metavar="ds_config.json | run DIR",
        help="with --routes: the job's config. run DIR: make a page on the run that has left its files in DIR",
    )
    report.add_argument("--output", type=Path, metavar="FILE", help="of `run DIR`: the page (default: DIR/report.html)")
    report.set_defaults(run=_report)

    validate = commands.add_parser("validate", help="check a ds_config.json before a job is started")
    validate.add_argument("config", metavar="ds_config.json")
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help='print the JSON Schema of the "mcrdl" block')
    schema.add_argument("--table", action="store_true", help="of tuning tables instead")
    schema.set_defaults(run=_schema)

    _add_hosts(commands.add_parser("hosts", help="run a job on an emulated cluster on this machine (root only)"))

    trace = commands.add_parser("trace", help="the timeline of a run").add_subparsers(required=True, metavar="COMMAND")
    merge = trace.add_parser("merge", help="join the ranks' traces into one file for https://ui.perfetto.dev")
    merge.add_argument("folder", type=Path, metavar="DIR", help='"folder" of the run\'s "observe" block')
    merge.add_argument("--output", type=Path, metavar="FILE", help="default: DIR/trace.json")
    merge.set_defaults(run=_merge_traces)

    flight = commands.add_parser("flight", help="the last calls of a run").add_subparsers(
        required=True, metavar="COMMAND"
    )
    show = flight.add_parser("show", help="which call each rank is in, and who is missing there")
    show.add_argument("folder", type=Path, metavar="DIR", help='"folder" of the run\'s "observe" block')
    show.add_argument("--last", type=int, default=0, metavar="N", help="the last N calls of each rank, too")
    show.set_defaults(run=_show_flight)

    bench = commands.add_parser("bench", help="benchmarks: train, ops, overhead, floor, fusion, chunk, compression")
    tune = commands.add_parser("tune", help="measure the backends and write the tuning table that jobs go by")
    if measures:  # these import torch, which the other commands need not wait for
        _add_benchmarks(bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK"))
        _add_tune(tune)
    return parser


def _add_benchmarks(bench: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from deepspeed_mcrdl.bench import chunk, compression, floor, fusion, ops, overhead, train

    for name, module, text in (
        ("train", train, "throughput of real training for each backend"),
        ("ops", ops, "every operation by size and backend"),
        ("overhead", overhead, "what routing adds to a call"),
        ("floor", floor, "how near shared memory comes to copying alone"),
        ("fusion", fusion, "where it pays to carry small calls together"),
        ("chunk", chunk, "where it pays to carry large calls in chunks"),
        ("compression", compression, "compressed all_reduce by codec and size: predicted, measured, and what it loses"),
    ):
        parser = bench.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(parser)
        parser.set_defaults(run=module.main)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    from deepspeed_mcrdl.tuning import sweep

    parser.description = sweep.__doc__
    sweep.add_arguments(parser)
    parser.set_defaults(run=sweep.main)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    import deepspeed_mcrdl.hosts as hosts  # not `from`, by which the package would look for it in the paper's interface

    parser.description = hosts.__doc__
    parser.epilog = f"example: {hosts.EXAMPLE}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    hosts.add_arguments(parser)
    parser.set_defaults(run=hosts.main)


def _report(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.report import report

    if args.routes:
        return _routes(args)
    if args.of:
        if len(args.of) != 2 or args.of[0] != "run":
            raise ConfigError(
                "a config is for --routes; `mcrdl validate` checks one; `mcrdl report run DIR` makes a page"
            )
        return _page(Path(args.of[1]), args.output)
    print(report())
    return 0


def _page(folder: Path, output: Path | None) -> int:
    from deepspeed_mcrdl.observe.page import write_page

    output = output or folder / "report.html"
    write_page(folder, output)
    print(output)
    return 0


def _routes(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from deepspeed_mcrdl.report import routes

    if len(args.of) > 1:
        raise ConfigError("--routes takes one config")
    found = routes(args.of[0] if args.of else None)
    shown = Table(title="which backend carries what (float32, CPU)")
    for title in ("operation", "group", "mesh", "bytes", "backend", "why"):
        shown.add_column(title)
    for row in found.rows:
        shown.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(shown)
    console.print(f"table: {found.table}\ncompression: {found.compression}", soft_wrap=True)
    return 0


def _validate(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.report import validate

    print(validate(args.config))
    return 0


def _merge_traces(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.observe.trace import merge

    output = args.output or args.folder / "trace.json"
    ranks, events = merge(args.folder, output)
    print(f"{output}: {events} events of {ranks} rank{'s' if ranks > 1 else ''}; open it at https://ui.perfetto.dev")
    return 0


def _show_flight(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.observe.flight import show

    for line in show(args.folder, args.last):
        print(line)
    return 0


def _schema(args: argparse.Namespace) -> int:
    import json

    from deepspeed_mcrdl.config import MCRDLConfig
    from deepspeed_mcrdl.routing.table import Table

    print(json.dumps((Table if args.table else MCRDLConfig).model_json_schema(), indent=2))
    return 0
