"""Records what calls a job makes, for the tuner: a line of JSON for each kind of call, with how often it was made."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.work import Work

ENVIRONMENT = "MCRDL_RECORD"  # a file, which goes before the config's
_WRITE_EVERY_S = 5.0


class CallRecord:
    """Counts calls by operation, dtype, mesh and bytes; may be fed from several threads.

    The file is written anew every few seconds and at the end, so that a job may be killed.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, str | None, str, int]] = Counter()
        self._lock = threading.Lock()
        self._written = 0.0

    def timed(self, call: Call, args: tuple[Any, ...], carry: Callable[[], Work | None]) -> Work | None:
        """Return what `carry` returns, with the call counted here."""
        operation, group, _, _ = call
        inputs, outputs = operation.tensors(*args)
        tensor = next(iter((*inputs, *outputs)), None)
        dtype = None if tensor is None else str(tensor.dtype).removeprefix("torch.")
        with self._lock:
            self._counts[operation.name, dtype, str(group.mesh), operation.size(group, *args)] += 1
        if time.monotonic() - self._written > _WRITE_EVERY_S:
            self.write()
        return carry()

    def write(self) -> None:
        """Write the file."""
        with self._lock:
            self._written = time.monotonic()
            lines = [
                json.dumps({"operation": operation, "dtype": dtype, "mesh": mesh, "bytes": size, "calls": calls})
                for (operation, dtype, mesh, size), calls in self._counts.most_common()
            ]
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        part.replace(self._path)
