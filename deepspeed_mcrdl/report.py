"""What `mcrdl report` and `mcrdl validate` say."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from deepspeed_mcrdl.agreement import why_unusable
from deepspeed_mcrdl.backends.base import installed
from deepspeed_mcrdl.config import AUTO, BLOCK_KEY, NAME, SELECTING_KEY, find, load
from deepspeed_mcrdl.errors import ConfigError, MCRDLError, suggest

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
    return "\n".join(lines)


def validate(path: str) -> str:
    """Return one sentence on the ds_config.json at `path`.

    Raises:
        ConfigError: if it can't be read, doesn't select the plugin, or is wrong.
    """
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    ds_config = load(path)
    if ds_config is None:
        raise ConfigError(f"{path} is not a JSON object")
    config = find(ds_config)
    if config is None:
        raise ConfigError(f'{path} does not select the plugin: add "{SELECTING_KEY}": "{NAME}"')
    known = installed()
    named = config.routing.backends() | (set() if config.backends == AUTO else set(config.backends))
    for name in sorted(named):
        if name not in known:
            raise ConfigError(f'{path}: unknown backend "{name}" in "{BLOCK_KEY}".{suggest(name, [*known, AUTO])}')
    unusable = {name: reason for name in sorted(named) if (reason := why_unusable(known[name])) is not None}
    if unusable:
        raise ConfigError(f"{path}: {'; '.join(f'{name} is not usable here: {why}' for name, why in unusable.items())}")
    return f"{path}: right"
