"""What this machine is and which versions it runs: the environment of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("deepspeed-mcrdl", "deepspeed", "torch", "mpi4py", "mpich", "numpy")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return package -> installed version."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def gpu_model() -> str | None:
    """Return the first CUDA device's name, None if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def process_age_s() -> float:
    """Return for how long this process has existed, in seconds; 0 where that can't be told."""
    try:
        started = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
