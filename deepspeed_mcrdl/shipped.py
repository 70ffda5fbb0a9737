"""Where the files lie that come with the package: examples, configs, tables."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from deepspeed_mcrdl.errors import MCRDLError


def folder(name: str) -> Path:
    """Return a folder such as "configs/tables": beside the package in a source tree, else where pip put it.

    Raises:
        MCRDLError: if it is missing.
    """
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return root / name
    # pip's own list: where data files go differs between --user, --prefix and a virtual environment.
    wanted = ("share", "deepspeed_mcrdl", *name.split("/"))
    for file in importlib.metadata.files("deepspeed-mcrdl") or ():
        if file.parent.parts[-len(wanted) :] == wanted:
            return Path(str(file.locate())).resolve().parent
    raise MCRDLError(f"the folder {name} is missing; install deepspeed_mcrdl from a wheel or run in its source tree")
