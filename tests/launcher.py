"""The plain `deepspeed` launcher, and what is looked for in what it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deepspeed_mcrdl.bench.launch import free_port

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Run:
    """A finished job: exit status and all that it printed."""

    status: int
    output: str

    def lines(self, start: str) -> list[str]:
        """Return what follows `start` in the lines that begin with it."""
        return [line[len(start) :].strip() for line in self.output.splitlines() if line.startswith(start)]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a rank on a CPU, without a test run's own settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "RANK", "WORLD_SIZE"))}
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def run(command: list[str], timeout_s: float = 120, cwd: Path | None = None, **env: str) -> Run:
    """Run a command in a process group of its own, which is ended as a whole after `timeout_s`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} was not done within {timeout_s} s:\n{output}") from None
    return Run(process.returncode, output)


def deepspeed(script: str | Path, *args: str, ranks: int = 2, timeout_s: float = 120, **env: str) -> Run:
    """Run a script under the plain launcher."""
    launcher = [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(free_port())]
    return run([*launcher, str(script), *args], timeout_s, **env)
