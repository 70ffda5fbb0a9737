"""The tuning table: which backend was measured to be best for an operation, class of dtypes, mesh and size.

The look-up is a fixed rule, so that all ranks, which have one table, come to one answer:

1. entries of the key's operation (send and recv are "send_recv") and device type;
2. of the key's class of dtypes if there are any, else of "float";
3. of one host if the key's group lies on one, of several if it spans several: neither says anything of the other;
4. of these the one whose mesh is nearest: by the ratio of the numbers of hosts, then of ranks on a host, then of
   strides, each as a logarithm; of two equally near ones the smaller group;
5. its size steps; a key whose bytes the ranks don't all know takes the entry's "unsized".

If that backend can't carry the call, the one with the least median at the nearest measured size that can does.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.config import CUTTABLE, SizeRule, check_size_list
from deepspeed_mcrdl.errors import TableError
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.machine import cores, cpu_model, gpu_model
from deepspeed_mcrdl.operations import OPERATIONS, Operation

VERSION = 2  # 1: without buckets and chunks
_ANY = "any"
_FALLBACK_CLASS = "float"
_CLASSES = ("float", "half", "integer", "complex")


def dtype_class(operation: Operation, dtype: torch.dtype | None) -> str:
    """Return the class of dtypes that cost the same in `operation`: "any" where bytes are only moved."""
    if not operation.reduces or dtype is None:
        return _ANY
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float" if dtype.itemsize >= 4 else "half"
    return "integer"


def table_name(operation: Operation) -> str:
    """Return the name of an operation in tables: both ends of a message take one backend, so they have one name."""
    return operation.name if operation.collective else operation.family


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fingerprint(_Model):
    """Where a table was made: what a choice of backends depends on."""

    cpu: str
    cores: int
    gpu: str | None = None
    backends: dict[str, str] = Field(description="backend -> the library that carries it, with its version")

    @classmethod
    def here(cls, backends: Mapping[str, type[Backend]]) -> Fingerprint:
        """Return this machine's, with the `backends` in use."""
        versions = {name: backend.version() for name, backend in backends.items()}
        return cls(cpu=cpu_model(), cores=cores(), gpu=gpu_model(), backends=versions)

    def differences(self, here: Fingerprint) -> list[str]:
        """Return what differs `here`, in words; a backend that was measured and is not in use is no difference."""
        pairs = [(name, getattr(self, name), getattr(here, name)) for name in ("cpu", "cores", "gpu")]
        common = sorted(self.backends.keys() & here.backends.keys())
        pairs += [(name, self.backends[name], here.backends[name]) for name in common]
        unmeasured = sorted(here.backends.keys() - self.backends.keys())
        return [
            *(f"{name} {made} there, {found} here" for name, made, found in pairs if made != found),
            *(f"{name} was not measured there" for name in unmeasured),
        ]


class Measurement(_Model):
    """One backend at one size; microseconds of the slowest rank."""

    bytes: int = Field(ge=0)
    backend: str
    median_us: float = Field(gt=0)
    p10_us: float = Field(gt=0)
    p90_us: float = Field(gt=0)
    samples: int = Field(ge=1)


class Entry(_Model):
    """The choice for one operation, class of dtypes, device and mesh."""

    operation: str
    dtype: Literal["any", "float", "half", "integer", "complex"]
    device: Literal["cpu", "cuda"]
    mesh: Mesh
    steps: tuple[SizeRule, ...]
    unsized: str = Field(description="backend for calls whose bytes the ranks don't all know")
    measured: tuple[Measurement, ...] = ()

    @field_validator("operation")
    @classmethod
    def _known_operation(cls, name: str) -> str:
        if name not in TABLE_NAMES:
            raise ValueError(f'unknown operation "{name}"')
        return name

    @field_validator("steps")
    @classmethod
    def _growing(cls, steps: tuple[SizeRule, ...]) -> tuple[SizeRule, ...]:
        check_size_list("steps", steps)
        return steps

    def choose(self, size: int | None, able: Callable[[str], bool]) -> tuple[str, str] | None:
        """Return (backend, why) for a call of `size` bytes among the backends that are `able`; None if none is."""
        wanted, limit = (self.unsized, "sizes unknown") if size is None else _step(self.steps, size)
        if able(wanted):
            return wanted, f"table, {limit}"
        medians = [m for m in self.measured if able(m.backend)]
        if not medians:
            return None
        best = min(medians, key=lambda m: (abs(_log(m.bytes) - _log(size or 0)), m.median_us))
        return best.backend, f"table, {wanted} can't"


class Bucket(_Model):
    """How large the buckets of fused calls by a backend are to be."""

    backend: str
    mesh: Mesh
    max_bytes: int | None = Field(ge=1, description="null: such calls are faster by themselves")
    gain: float = Field(gt=0, description="how many times as fast as by themselves the calls measured were")


class Chunk(_Model):
    """How large the chunks are to be that a backend carries large calls of an operation in."""

    operation: str
    backend: str
    mesh: Mesh
    max_bytes: int | None = Field(ge=4096, description="null: such calls are not slower whole")
    gain: float = Field(gt=0, description="how many times as fast as whole the calls measured were")

    @field_validator("operation")
    @classmethod
    def _cuttable(cls, name: str) -> str:
        if name not in CUTTABLE:
            raise ValueError(f'calls of "{name}" can\'t be cut')
        return name


class Table(_Model):
    """What `mcrdl tune` writes."""

    version: Literal[1, 2] = 2
    made: str = Field(description="date")
    how: str = Field(description="the command or job that made it")
    fingerprint: Fingerprint
    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def ranks(self) -> int:
        """The size of the largest group that was measured: in most cases of the job that made the table."""
        return max((entry.mesh.nodes * entry.mesh.ranks_per_node for entry in self.entries), default=0)

    def write(self, path: Path) -> None:
        """Write the table to `path` at once, so that no reader sees a part of it."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        part.replace(path)


Measured = TypeVar("Measured", Entry, Bucket, Chunk)

TABLE_NAMES = frozenset(table_name(operation) for operation in OPERATIONS.values())


class Lookup:
    """A table in use.

    Args:
        table: the table.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._entries: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in table.entries:
            self._entries[entry.operation, entry.device].append(entry)

    def entry(self, operation: Operation, dtype: torch.dtype | None, device: str | None, mesh: Mesh) -> Entry | None:
        """Return the entry that speaks for a call, None if there is none."""
        entries = self._entries.get((table_name(operation), device or "cpu"), [])
        wanted = dtype_class(operation, dtype)
        for kind in dict.fromkeys((wanted, _ANY if wanted == _ANY else _FALLBACK_CLASS)):
            near = _nearest([entry for entry in entries if entry.dtype == kind], mesh)
            if near is not None:
                return near
        return None

    def bucket(self, backend: str, mesh: Mesh) -> Bucket | None:
        """Return what was measured of fused calls by a backend, None if nothing was."""
        return _nearest([bucket for bucket in self._table.buckets if bucket.backend == backend], mesh)

    def chunk(self, operation: Operation, backend: str, mesh: Mesh) -> Chunk | None:
        """Return what was measured of calls in chunks by a backend, None if nothing was."""
        what = operation.name, backend
        return _nearest([chunk for chunk in self._table.chunks if (chunk.operation, chunk.backend) == what], mesh)


def parse_table(text: str, path: str) -> Table:
    """Return the table that `text` holds.

    Raises:
        TableError: if it is not JSON, no table, or of a newer version; names `path` and the first mistake.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TableError(
            f"{path} is not a tuning table: it is not JSON, or cut off ({error}); `mcrdl tune` makes one"
        ) from None
    if not isinstance(content, dict) or "entries" not in content:
        raise TableError(f'{path} is not a tuning table: it has no "entries"; `mcrdl tune` makes one')
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise TableError(f"{path} is a table of version {version}; this deepspeed_mcrdl reads up to version {VERSION}")
    try:
        return Table.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise TableError(f'{path} is not a tuning table: in "{place}": {first["msg"]}') from None


def read_table(path: Path) -> Table:
    """Return the table at `path`.

    Raises:
        TableError: if it can't be read, or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TableError(f"the tuning table {path} can't be read: {reason}; `mcrdl tune` makes one") from None
    return parse_table(text, str(path))


def today() -> str:
    """Return the date as tables give it."""
    return time.strftime("%Y-%m-%d")


def _step(steps: Sequence[SizeRule], size: int) -> tuple[str, str]:
    for step in steps[:-1]:
        if step.max_bytes is not None and size <= step.max_bytes:
            return step.backend, f"up to {step.max_bytes} bytes"
    above = f"above {steps[-2].max_bytes} bytes" if len(steps) > 1 else "all sizes"
    return steps[-1].backend, above


def _nearest(measured: Sequence[Measured], mesh: Mesh) -> Measured | None:
    """Return what is nearest to `mesh`, of one host or of several as it is; of two equally near the smaller group."""

    near = [one for one in measured if (one.mesh.nodes > 1) == (mesh.nodes > 1)]
    return min(near, key=lambda one: _distance(one.mesh, mesh), default=None)


def _distance(measured: Mesh, mesh: Mesh) -> tuple[float, ...]:
    mine, other = _shape(measured), _shape(mesh)
    return (*(abs(_log(a) - _log(b)) for a, b in zip(mine, other, strict=True)), *mine)


def _shape(mesh: Mesh) -> tuple[int, int, int]:
    return mesh.nodes, mesh.ranks_per_node, mesh.stride


def _log(number: float) -> float:
    return math.log2(max(number, 0.5))  # 0, for "it differs", lies beside 1
