"""Finds the table for a job: the one that the config names, or the newest that was made on a machine like this."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from deepspeed_mcrdl.config import AUTO, Tuning
from deepspeed_mcrdl.errors import MCRDLError, TableError
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.routing.table import Fingerprint, Table, read_table
from deepspeed_mcrdl.shipped import folder


class Found(NamedTuple):
    """A table, where it was, and whether it was made on a machine like this."""

    path: Path
    table: Table
    fits: bool


ENVIRONMENT = "MCRDL_TABLES"  # a folder of tables that stands for the user's own and the shipped ones


def own_tables() -> Path:
    """Return the user's folder of tables: $MCRDL_TABLES, else mcrdl/tables in the XDG data folder."""
    if ENVIRONMENT in os.environ:
        return Path(os.environ[ENVIRONMENT])
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share"), "mcrdl", "tables")


def find_table(tuning: Tuning, here: Fingerprint, ranks: int | None = None) -> Found | None:
    """Return the table that `tuning` asks for, for a job of `ranks`.

    A named table is used also where the machine or versions differ, with a warning that says what. "auto" takes only
    a table without differences, the user's before a shipped one: the newest made with as many ranks, else the newest.

    Raises:
        TableError: if the named table can't be read, or differs and "strict" is set.
    """
    if tuning.table is None:
        return None
    if tuning.table == AUTO:
        places = (own_tables,) if ENVIRONMENT in os.environ else (own_tables, _shipped)
        for place in places:
            fitting = [found for found in _in(place, here) if found.fits]
            if fitting:
                return max(fitting, key=lambda found: (found.table.ranks == ranks, found.table.made, found.path.name))
        return None
    path = Path(tuning.table).expanduser()
    table = read_table(path)
    differences = "; ".join(table.fingerprint.differences(here))
    if differences and tuning.strict:
        raise TableError(f'the tuning table {path} was made elsewhere ("tuning.strict" is set): {differences}')
    if differences:
        logger.warning("the tuning table %s was made elsewhere and may mislead: %s", path, differences)
    return Found(path, table, fits=not differences)


def _shipped() -> Path:
    return folder("configs/tables")


def _in(place: Callable[[], Path], here: Fingerprint) -> Iterator[Found]:
    try:
        paths = sorted(place().glob("*.json"))
    except (MCRDLError, OSError, RuntimeError):  # no such folder, or no home
        return
    for path in paths:
        try:
            table = read_table(path)
        except TableError as error:
            logger.warning("passed over: %s", error)
            continue
        yield Found(path, table, fits=not table.fingerprint.differences(here))
