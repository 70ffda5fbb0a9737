"""The catalogue's names of the reduce operations that callers pass."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from deepspeed_mcrdl.errors import UnsupportedError
from deepspeed_mcrdl.operations import REDUCE_OPS

_NAMES: dict[Any, str] = {getattr(dist.ReduceOp, name.upper()): name for name in REDUCE_OPS}
# Enumerations hash slowly, and callers nearly always pass the members themselves.
_NAMES_BY_ID = {id(member): name for member, name in _NAMES.items()}


def know(enumeration: Any) -> None:
    """Know the members of another enumeration with torch's names, such as DeepSpeed's."""
    for name in REDUCE_OPS:
        member = getattr(enumeration, name.upper(), None)
        if member is not None:
            _NAMES[member] = name
            _NAMES_BY_ID[id(member)] = name


def op_name(op: Any) -> str:
    """Return the catalogue's name of a reduce operation.

    Raises:
        UnsupportedError: if the catalogue has no such operation.
    """
    if isinstance(op, str) and op.lower() in REDUCE_OPS:
        return op.lower()
    name = _NAMES_BY_ID.get(id(op)) or _NAMES.get(getattr(op, "op", op))  # torch's options wrap the member
    if name is None:
        raise UnsupportedError(f"reduce operation {op} is not known; known are {', '.join(REDUCE_OPS)}")
    return name
