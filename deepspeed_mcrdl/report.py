"""What `mcrdl report`, `mcrdl report --routes` and `mcrdl validate` say."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed_mcrdl.agreement import why_unusable
from deepspeed_mcrdl.backends.base import installed
from deepspeed_mcrdl.config import AUTO, BLOCK_KEY, NAME, SELECTING_KEY, Compression, MCRDLConfig, find, load, parts_of
from deepspeed_mcrdl.errors import ConfigError, MCRDLError, suggest
from deepspeed_mcrdl.operations import BARRIER, OPERATIONS
from deepspeed_mcrdl.routing.router import ONE_HOST, Key, Router, size_label
from deepspeed_mcrdl.routing.shelf import find_table
from deepspeed_mcrdl.routing.table import Fingerprint, Lookup, read_table
from deepspeed_mcrdl.transforms.compression import codec as codecs
from deepspeed_mcrdl.transforms.compression.policy import described, why_no_codec
from deepspeed_mcrdl.transforms.hierarchical import pairs

_PACKAGES = ("deepspeed-mcrdl", "deepspeed", "torch", "mpi4py", "mpich", "pydantic")


def report() -> str:
    """Return one line for each package and backend: version, usable or why not. Never raises for a broken backend."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    lines.append("")
    try:
        backends = installed()
    except MCRDLError as error:
        return "\n".join([*lines, f"backends: {error}"])
    for name, cls in backends.items():
        reason = why_unusable(cls)
        lines.append(f"{name:6} {f'usable: {cls.version()}' if reason is None else f'not usable: {reason}'}")
    try:
        lacks = {name: why_no_codec(Compression(codec=name)) for name in codecs.installed()}
    except MCRDLError as error:
        return "\n".join([*lines, f"codecs: {error}"])
    lines += ["", f"codecs: {', '.join(name for name, lack in lacks.items() if lack is None)}"]
    lines += [lack for lack in lacks.values() if lack is not None]
    return "\n".join(lines)


class Routes(NamedTuple):
    """The map that a job started here would have.

    Attributes:
        table: the tuning table in force, in words.
        compression: what is compressed, in words.
        rows: (operation, kind of group, mesh, sizes, backend, why) for float32 tensors in memory.
    """

    table: str
    compression: str
    rows: list[tuple[str, str, str, str, str, str]]


def routes(path: str | None) -> Routes:
    """Return which backend would carry what with the ds_config.json at `path`, or else without any keys in its block.

    Raises:
        ConfigError: if the config, or the table that it names, is wrong.
    """
    config = MCRDLConfig() if path is None else _read(path)
    usable = {
        name: cls
        for name, cls in installed().items()
        if why_unusable(cls) is None and (config.backends == AUTO or name in config.backends)
    }
    found = find_table(config.tuning, Fingerprint.here(usable))
    router = Router(config.routing, {**usable, **pairs(usable)}, None if found is None else Lookup(found.table))
    meshes = [ONE_HOST] if found is None else list(dict.fromkeys(entry.mesh for entry in found.table.entries))
    rows = []
    for operation in OPERATIONS.values():
        for kind in ("world", *config.routing.groups):
            for mesh in meshes:
                op = "sum" if operation.reduces else None
                key = Key(operation, kind, torch.float32 if operation is not BARRIER else None, "cpu", op, mesh=mesh)
                for first, last, decision in router.ranges(key):
                    sizes = size_label(first, last).strip() or "all"
                    where = str(mesh) if found is not None else "any"
                    rows.append((operation.name, kind, where, sizes, decision.backend, decision.why))
    table = "none: `mcrdl tune` makes one" if found is None else f"{found.path} ({found.table.made})"
    return Routes(table, described(config.compression), rows)


def _read(path: str) -> MCRDLConfig:
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    ds_config = load(path)
    if ds_config is None:
        raise ConfigError(f"{path} is not a JSON object")
    try:
        config = find(ds_config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if config is None:
        raise ConfigError(f'{path} does not select the plugin: add "{SELECTING_KEY}": "{NAME}"')
    return config


def validate(path: str) -> str:
    """Return one sentence on the ds_config.json at `path`.

    Raises:
        ConfigError: if it can't be read, doesn't select the plugin, or is wrong.
    """
    config = _read(path)
    known = installed()
    named = parts_of(config.routing.backends()) | (set() if config.backends == AUTO else set(config.backends))
    for name in sorted(named):
        if name not in known:
            raise ConfigError(f'{path}: unknown backend "{name}" in "{BLOCK_KEY}".{suggest(name, [*known, AUTO])}')
    if config.tuning.table not in (None, AUTO):
        read_table(Path(config.tuning.table).expanduser())
    lack = why_no_codec(config.compression)
    if lack is not None:
        raise ConfigError(f"{path}: {lack}")
    unusable = {name: reason for name in sorted(named) if (reason := why_unusable(known[name])) is not None}
    if unusable:
        raise ConfigError(f"{path}: {'; '.join(f'{name} is not usable here: {why}' for name, why in unusable.items())}")
    return f"{path}: right"
