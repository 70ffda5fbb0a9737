"""MPI operators on 16-bit floats, for which MPI has no portable type and some libraries silently compute wrong sums.

torch does the arithmetic and rounds once for each pair of ranks, as gloo does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

HALVES = frozenset({torch.float16, torch.bfloat16})
_HALF_OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda into, other: into.add_(other),
    "min": lambda into, other: torch.minimum(into, other, out=into),
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "product": lambda into, other: into.mul_(other),
}


@functools.cache  # MPI bindings have room for a few operators only, and a process can start several runtimes
def half_op(dtype: torch.dtype, op: str) -> MPI.Op:
    """Return the MPI operator for "sum", "min", "max" or "product" of `dtype`, whose values travel as UINT16_T."""
    from mpi4py import MPI

    return MPI.Op.Create(partial(_reduce_halves, dtype, _HALF_OPERATORS[op]), commute=True)


def _reduce_halves(
    dtype: torch.dtype,
    operator: Callable[[torch.Tensor, torch.Tensor], Any],
    incoming: MPI.buffer,
    into: MPI.buffer,
    datatype: MPI.Datatype,
) -> None:
    """An MPI operator on 16-bit floats: torch rounds once for each pair of ranks, as gloo does."""
    if into.nbytes:
        operator(torch.frombuffer(into, dtype=dtype), torch.frombuffer(incoming, dtype=dtype))
