"""The mcrdl command: argument parsing only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepspeed_mcrdl import __version__
from deepspeed_mcrdl.errors import MCRDLError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 right, 1 a result was wrong or a run failed, 2 a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(with_benchmarks="bench" in argv).parse_args(argv)
    try:
        status: int = args.run(args)
    except MCRDLError as error:
        print(f"mcrdl: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    return status


def _parser(with_benchmarks: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcrdl", description="Mix-and-match communication backends for DeepSpeed (MCR-DL)."
    )
    parser.add_argument("--version", action="version", version=f"mcrdl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="one line for each backend: usable or why not, and versions")
    report.set_defaults(run=_report)

    validate = commands.add_parser("validate", help="check a ds_config.json before a job is started")
    validate.add_argument("config", metavar="ds_config.json")
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help='print the JSON Schema of the "mcrdl" block')
    schema.set_defaults(run=_schema)

    bench = commands.add_parser("bench", help="benchmarks: train, overhead")
    if with_benchmarks:  # they import torch, which the other commands need not wait for
        _add_benchmarks(bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK"))
    return parser


def _add_benchmarks(bench: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from deepspeed_mcrdl.bench import overhead, train

    for name, module, text in (
        ("train", train, "throughput of real training for each backend"),
        ("overhead", overhead, "what routing adds to a call"),
    ):
        parser = bench.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(parser)
        parser.set_defaults(run=module.main)


def _report(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.report import report

    print(report())
    return 0


def _validate(args: argparse.Namespace) -> int:
    from deepspeed_mcrdl.report import validate

    print(validate(args.config))
    return 0


def _schema(args: argparse.Namespace) -> int:
    import json

    from deepspeed_mcrdl.config import MCRDLConfig

    print(json.dumps(MCRDLConfig.model_json_schema(), indent=2))
    return 0
