"""The JSON that every benchmark writes: what was measured, on what, with which versions."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_mcrdl.machine import cores, cpu_model, gpu_model, versions


def environment() -> dict[str, Any]:
    """Return date, versions and hardware."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "gpu": gpu_model(),
    }


def write_json(path: str | Path, bench: str, rows: Sequence[Mapping[str, Any]], **config: Any) -> None:
    """Write ``{"bench": ..., "environment": {..., "config": ...}, "rows": [...]}`` to `path`."""
    result = {"bench": bench, "environment": {**environment(), "config": config}, "rows": list(rows)}
    Path(path).write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
