"""Strided tensors: the call is made on contiguous copies, and results are copied to the caller's tensors.

No backend takes strided memory rightly (gloo silently gives wrong values), so this goes before every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_mcrdl.aside import then
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.work import Pending


def through_contiguous(operation: Operation, method: Callable[..., Pending]) -> Callable[..., Pending]:
    """Return `method` made fit for strided tensors."""

    def call(group: Group, *args: Any) -> Pending:
        inputs, outputs = operation.tensors(*args)
        copies: dict[int, torch.Tensor] = {}
        pending = method(group, *(_contiguous(argument, copies) for argument in args))

        def copy_back() -> None:
            with torch.no_grad():
                for output in outputs:
                    if id(output) in copies:
                        output.copy_(copies[id(output)])

        return then(pending, copy_back, next(iter((*inputs, *outputs))))

    return call


def _contiguous(argument: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(argument, torch.Tensor):
        if argument.is_contiguous():
            return argument
        return copies.setdefault(id(argument), argument.contiguous())
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return [_contiguous(entry, copies) for entry in argument]
    return argument
