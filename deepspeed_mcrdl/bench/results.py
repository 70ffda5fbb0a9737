"""The JSON that every benchmark writes: what was measured, on what, with which versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("deepspeed-mcrdl", "deepspeed", "torch", "mpi4py", "mpich", "numpy")


def environment() -> dict[str, Any]:
    """Return date, versions and hardware."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions,
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def write_json(path: str | Path, bench: str, rows: Sequence[Mapping[str, Any]], **config: Any) -> None:
    """Write ``{"bench": ..., "environment": {..., "config": ...}, "rows": [...]}`` to `path`."""
    result = {"bench": bench, "environment": {**environment(), "config": config}, "rows": list(rows)}
    Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
