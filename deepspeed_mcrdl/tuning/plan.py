"""What a sweep measures: cells, each an operation on a mesh with a dtype and a size, and how much each matters."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_mcrdl.bench.cases import DTYPES, MESSAGES, case_names
from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.operations import OPERATIONS, SEND, Operation
from deepspeed_mcrdl.routing.table import dtype_class


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        mesh: the group's mesh in words.
        name: a case's name, which is the operation's in tables.
        dtype: dtype of the tensors.
        size: bytes.
    """

    mesh: str
    name: str
    dtype: str
    size: int

    @property
    def operation(self) -> Operation:
        """The entry of the catalogue."""
        return SEND if self.name == MESSAGES else OPERATIONS[self.name]

    @property
    def dtype_class(self) -> str:
        """The class of dtypes that the cell stands for."""
        return dtype_class(self.operation, DTYPES[self.dtype])

    @property
    def line(self) -> tuple[str, str, str]:
        """What the cells of one entry of a table have in common."""
        return self.mesh, self.name, self.dtype_class


def grid(meshes: Sequence[str], names: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int]) -> dict[Cell, float]:
    """Return the cells of all combinations, each of weight 1; a dtype counts once for each class that it stands for."""
    cells: dict[Cell, float] = {}
    lines = set()
    for mesh in meshes:
        for name in names:
            for dtype in dtypes:
                first = Cell(mesh, name, dtype, 0)
                if first.line in lines:
                    continue
                lines.add(first.line)
                for size in [0] if name == "barrier" else sizes:
                    cells[Cell(mesh, name, dtype, size)] = 1.0
    return cells


def from_record(path: Path) -> dict[Cell, float]:
    """Return the cells of a recorded job (observe/record.py), weighted by calls.

    Sizes are rounded to powers of two.

    Raises:
        ConfigError: if `path` can't be read or is no record.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a record of a job's calls: {error}") from None
    weights: dict[Cell, float] = defaultdict(float)
    for row in rows:
        try:
            name = MESSAGES if row["operation"] in ("send", "recv") else row["operation"]
            dtype, size, calls = row["dtype"] or "float32", int(row["bytes"]), float(row["calls"])
            mesh = row["mesh"]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a record of a job's calls: a line has no {error}") from None
        one_rank = str(mesh).partition("/")[0] == "1x1"  # nothing to choose
        if one_rank or name not in case_names() or dtype not in DTYPES:
            continue
        weights[Cell(mesh, name, dtype, _rounded(size))] += calls
    if not weights:
        raise ConfigError(f"{path} records no call: the job has to run to its end, or for some seconds at least")
    return dict(weights)


def coarse_first(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells so that every line's ends and middle come before the sizes between, whenever time runs out."""
    by_line: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        by_line[cell.line].append(cell)
    ranked = []
    for line in by_line.values():
        line.sort(key=lambda cell: cell.size)
        ranked += [(rank, place, cell) for place, (rank, cell) in enumerate(zip(_ranks(len(line)), line, strict=True))]
    return [cell for _, _, cell in sorted(ranked, key=lambda item: (item[0], item[1]))]


def _ranks(count: int) -> list[int]:
    """Return for each place when it is visited by halving: the ends first."""
    ranks = [0] * count
    step, rank = max(1, count - 1), 0
    seen: set[int] = set()
    while len(seen) < count:
        for place in [*range(0, count, step), count - 1]:
            if place not in seen:
                seen.add(place)
                ranks[place] = rank
        step, rank = max(1, step // 2), rank + 1
    return ranks


def _rounded(size: int) -> int:
    return 0 if size <= 0 else 1 << max(0, round(math.log2(size)))
