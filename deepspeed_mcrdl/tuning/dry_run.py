"""Runs a job for a while to see what calls it makes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.observe.record import ENVIRONMENT

_GRACE_S = 10.0
_OUTPUT_LINES = 15


def dry_run(command: str, limit_s: float) -> Path:
    """Run `command`, end it after `limit_s` seconds if it goes on, and return the record of its calls.

    Raises:
        ConfigError: if it failed or made no record; with its last lines.
    """
    record = Path(tempfile.mkdtemp(prefix="mcrdl-job-"), "calls.jsonl")
    arguments = shlex.split(command)
    print(f"running the job for at most {limit_s:g} s: {command}", file=sys.stderr)
    try:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, ENVIRONMENT: str(record)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"the job can't be started: {error}") from None
    try:
        output, _ = process.communicate(timeout=limit_s)
        failed = process.returncode != 0
    except subprocess.TimeoutExpired:
        output, failed = _end(process), False
    except BaseException:
        _end(process)
        raise
    tail = "\n".join(output.splitlines()[-_OUTPUT_LINES:])
    if failed:
        raise ConfigError(f"the job ended with status {process.returncode}; it printed last:\n{tail}")
    if not record.is_file():
        raise ConfigError(
            'the job recorded no call: is "comm_backend": "mcrdl" in its config, and did it come to its first steps? '
            f"It printed last:\n{tail}"
        )
    return record


def _end(process: subprocess.Popen[str]) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output
