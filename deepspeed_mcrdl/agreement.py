"""What the ranks settle at the start, over the launcher's store: one config, and the backends that all can use.

It does not presume that any backend works. Every rank comes to the same result or raises the same error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.backends.base import Backend, Job, classes_of, installed
from deepspeed_mcrdl.config import AUTO, PAIR, MCRDLConfig, parts_of
from deepspeed_mcrdl.errors import ConfigError, MCRDLError, TableError, suggest
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.routing.shelf import Found, find_table
from deepspeed_mcrdl.routing.table import Fingerprint, Table
from deepspeed_mcrdl.stores import exchange, from_rank_0
from deepspeed_mcrdl.transforms.compression.policy import why_no_codec
from deepspeed_mcrdl.transforms.hierarchical import pairs


def agree(config: MCRDLConfig, job: Job) -> tuple[dict[str, Backend], dict[str, str]]:
    """Start the backends of the job.

    Returns:
        The started backends by name, in order of preference, and those left out with the reason.

    Raises:
        ConfigError: on every rank, if the ranks' configs differ or a backend that the config names can't be used.
        MCRDLError: on every rank, if no backend is left.
    """
    classes = installed()
    unusable = {name: reason for name, cls in classes.items() if (reason := why_unusable(cls)) is not None}
    report = {
        "config": config.model_dump(mode="json"),
        "unusable": unusable,
        "codec": why_no_codec(config.compression),
        "versions": {name: cls.version() for name, cls in classes.items() if name not in unusable},
    }
    reports = exchange(job.quick_store, "agreement", job.rank, job.world_size, report, job.start_timeout_s)
    _require_same_config([report["config"] for report in reports])
    for rank, report in enumerate(reports):
        if report["codec"] is not None:  # not on all ranks where a library is not installed
            everywhere = all(other["codec"] == report["codec"] for other in reports)
            raise ConfigError(report["codec"] if everywhere else f"on rank {rank}: {report['codec']}")
    left_out = _first_reasons([report["unusable"] for report in reports])
    for name in classes:
        versions = [report["versions"].get(name) for report in reports]
        if name not in left_out and len(set(versions)) > 1:
            left_out[name] = f"its versions differ: {_by_rank(versions)}"
    wanted = _wanted(config, classes, left_out)
    if config.backends == AUTO:
        wanted = [name for name in wanted if name not in left_out]
    else:
        left_out = {}
    started = _start(wanted, classes, job, left_out)
    if not started:
        raise MCRDLError(f"no backend could be started: {'; '.join(f'{n}: {r}' for n, r in left_out.items())}")
    return started, left_out


def agree_on_table(
    config: MCRDLConfig, store: Store, rank: int, ranks: int, backends: Mapping[str, Backend], timeout_s: float
) -> Found | None:
    """Return rank 0's tuning table, on every rank the same one whatever files the other ranks have.

    Raises:
        TableError: on every rank, if rank 0 can't use the table that the config names.
    """

    def load() -> dict[str, Any]:
        here = Fingerprint.here(classes_of(backends))
        try:
            found = find_table(config.tuning, here, ranks)
        except TableError as error:
            return {"error": str(error)}
        if found is None:
            return {}
        return {"path": str(found.path), "table": found.table.model_dump(mode="json"), "fits": found.fits}

    told = from_rank_0(store, "table", rank, load, timeout_s)
    if "error" in told:
        raise TableError(told["error"])
    return Found(Path(told["path"]), Table.model_validate(told["table"]), told["fits"]) if told else None


def why_unusable(cls: type[Backend]) -> str | None:
    """Return why a backend can't be used in this process, whatever its library does when it is asked."""
    try:
        return cls.unusable()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _require_same_config(configs: list[Any]) -> None:
    for rank, config in enumerate(configs):
        if config != configs[0]:
            differing = [key for key in config if config[key] != configs[0].get(key)]
            shown = "; ".join(
                f'"mcrdl.{key}" is {json.dumps(configs[0].get(key))} on rank 0 '
                f"but {json.dumps(config[key])} on rank {rank}"
                for key in differing
            )
            raise ConfigError(f"the ranks have different configs: {shown}. Give every rank the same ds_config.json")


def _first_reasons(reasons_by_rank: list[dict[str, str]]) -> dict[str, str]:
    """Return backend -> the first rank's reason not to use it, with the rank if others can."""
    merged: dict[str, str] = {}
    for rank, reasons in enumerate(reasons_by_rank):
        for name, reason in reasons.items():
            alone = sum(name in other for other in reasons_by_rank) < len(reasons_by_rank)
            merged.setdefault(name, f"{reason} (rank {rank})" if alone else reason)
    return merged


def _by_rank(values: list[Any]) -> str:
    first_rank: dict[Any, int] = {}
    for rank, value in enumerate(values):
        first_rank.setdefault(value, rank)
    return ", ".join(f"{value} on rank {rank}" for value, rank in first_rank.items())


def _wanted(config: MCRDLConfig, classes: dict[str, type[Backend]], left_out: dict[str, str]) -> list[str]:
    """Return the backends to start, in order of preference."""
    rules = config.routing.backends()
    for name in sorted(parts_of(rules) | (set() if config.backends == AUTO else set(config.backends))):
        if name not in classes:
            raise ConfigError(f'unknown backend "{name}".{suggest(name, [*classes, AUTO])}')
        if name in left_out:
            raise ConfigError(
                f'the config asks for the backend "{name}", which can\'t be used: {left_out[name]}. '
                "`mcrdl report` shows what is usable here"
            )
    possible = pairs(classes)
    for name in sorted(rules):
        if PAIR in name and name not in possible:
            raise ConfigError(
                f'unknown pair of backends "{name}": the first one carries steps within hosts, the second one those '
                f"between them.{suggest(name, possible)}"
            )
    return [name for name in classes if config.backends == AUTO or name in config.backends]


def _start(
    names: list[str], classes: dict[str, type[Backend]], job: Job, left_out: dict[str, str]
) -> dict[str, Backend]:
    """Start backends in turn; one that fails on any rank is dropped on all, and `left_out` says why."""
    started: dict[str, Backend] = {}
    for name in names:
        backend, failure = None, ""
        try:
            backend = classes[name](job)
        except Exception as error:  # whatever a library does wrong at its start, the others must hear of it
            failure = f"{type(error).__name__}: {error}"
        failures = exchange(job.quick_store, f"started/{name}", job.rank, job.world_size, failure, job.start_timeout_s)
        failed = {rank: text for rank, text in enumerate(failures) if text}
        if not failed and backend is not None:
            started[name] = backend
            continue
        if backend is not None:
            backend.close()
        rank, text = next(iter(failed.items()))
        left_out[name] = f"failed to start on rank {rank}: {text}"
        if job.rank == 0:
            logger.warning("the backend %s is not used: %s", name, left_out[name])
    return started
