"""What must hold of the arguments of each operation: sizes, dtypes, devices, splits, roots.

The catalogue (operations.py) names the check of each of its entries. A check raises CallError with the numbers at
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.groups import Group

Tensors = Sequence[torch.Tensor]


def _same_kind(name: str, group: Group, tensors: Tensors) -> None:
    dtypes = {t.dtype for t in tensors}
    devices = {t.device for t in tensors}
    if len(dtypes) > 1:
        raise CallError(f"{name} on {group}: all tensors must have one dtype, got {sorted(map(str, dtypes))}")
    if len(devices) > 1:
        raise CallError(f"{name} on {group}: all tensors must be on one device, got {sorted(map(str, devices))}")
    if any(t.layout is not torch.strided for t in tensors):
        raise CallError(f"{name} on {group}: sparse tensors can't be communicated; call .to_dense() first")


def tensor_check(name: str) -> Callable[..., None]:
    def check(group: Group, tensor: torch.Tensor, *rest: Any) -> None:
        _same_kind(name, group, (tensor,))

    return check


def block_check(name: str, large_output: bool) -> Callable[..., None]:
    """One of the two tensors holds a block for each rank, the other one block."""

    def check(group: Group, output: torch.Tensor, input: torch.Tensor, op: str | None = None) -> None:
        _same_kind(name, group, (output, input))
        large, small = (output, input) if large_output else (input, output)
        if large.numel() != small.numel() * group.size:
            role = ("output", "input") if large_output else ("input", "output")
            raise CallError(
                f"{name} on {group}: the {role[0]} must have {group.size} x the {role[1]}'s {small.numel()} elements, "
                f"got {large.numel()}"
            )

    return check


def _check_list(name: str, group: Group, tensors: Tensors | None, other: torch.Tensor, role: str, even: bool) -> None:
    if tensors is None:
        raise CallError(f"{name} on {group}: the root rank must give the list of {role}")
    if len(tensors) != group.size:
        raise CallError(
            f"{name} on {group}: needs one of the {role} for each of {group.size} ranks, got {len(tensors)}"
        )
    _same_kind(name, group, (*tensors, other))
    if tensors[group.rank].numel() != other.numel():
        raise CallError(
            f"{name} on {group}: entry {group.rank} of the {role} has {tensors[group.rank].numel()} elements, "
            f"but this rank's own tensor has {other.numel()}"
        )
    if even and any(t.numel() != other.numel() for t in tensors):
        raise CallError(f"{name} on {group}: the {role} must have equal sizes, got {[t.numel() for t in tensors]}")


def check_all_gather(group: Group, outputs: Tensors, input: torch.Tensor) -> None:
    _check_list("all_gather", group, outputs, input, "outputs", even=False)


def check_gather(group: Group, outputs: Tensors | None, input: torch.Tensor, dst: int) -> None:
    if group.index(dst) == group.rank:
        _check_list("gather", group, outputs, input, "outputs", even=True)


def check_gatherv(group: Group, outputs: Tensors | None, input: torch.Tensor, dst: int) -> None:
    if group.index(dst) == group.rank:
        _check_list("gatherv", group, outputs, input, "outputs", even=False)


def check_scatter(group: Group, output: torch.Tensor, inputs: Tensors | None, src: int) -> None:
    if group.index(src) == group.rank:
        _check_list("scatter", group, inputs, output, "inputs", even=True)


def check_scatterv(group: Group, output: torch.Tensor, inputs: Tensors | None, src: int) -> None:
    if group.index(src) == group.rank:
        _check_list("scatterv", group, inputs, output, "inputs", even=False)


def check_reduce_scatter(group: Group, output: torch.Tensor, inputs: Tensors, op: str) -> None:
    _check_list("reduce_scatter", group, inputs, output, "inputs", even=False)


def _check_splits(group: Group, role: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> None:
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % group.size:
            raise CallError(
                f"all_to_all_single on {group}: the {role}'s {rows} rows can't be divided by {group.size} ranks; "
                "give split sizes"
            )
    elif len(splits) != group.size or sum(splits) != rows or any(s < 0 for s in splits):
        raise CallError(
            f"all_to_all_single on {group}: {role} split sizes {list(splits)} must be {group.size} numbers >= 0 that "
            f"add up to the {rows} rows"
        )


def check_all_to_all_single(
    group: Group,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> None:
    _same_kind("all_to_all_single", group, (output, input))
    if output_splits is None and input_splits is None:
        if output.numel() != input.numel():
            raise CallError(
                f"all_to_all_single on {group}: without split sizes input and output must be equally large, "
                f"got {input.numel()} and {output.numel()} elements"
            )
        if input.numel() % group.size:
            raise CallError(
                f"all_to_all_single on {group}: {input.numel()} elements can't be divided by {group.size} ranks; "
                "give split sizes"
            )
        return
    _check_splits(group, "output", output, output_splits)
    _check_splits(group, "input", input, input_splits)
    own_in = input_splits[group.rank] if input_splits else input.shape[0] // group.size
    own_out = output_splits[group.rank] if output_splits else output.shape[0] // group.size
    if own_in * row_numel(input) != own_out * row_numel(output):
        raise CallError(
            f"all_to_all_single on {group}: this rank sends itself {own_in * row_numel(input)} elements, "
            f"but expects {own_out * row_numel(output)}"
        )


def row_numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of one row, the unit of split sizes."""
    return tensor[0].numel() if tensor.dim() and tensor.shape[0] else 0


def check_all_to_all(group: Group, outputs: Tensors, inputs: Tensors) -> None:
    for role, tensors in (("outputs", outputs), ("inputs", inputs)):
        if len(tensors) != group.size:
            raise CallError(
                f"all_to_all on {group}: needs one of the {role} for each of {group.size} ranks, got {len(tensors)}"
            )
    _same_kind("all_to_all", group, (*outputs, *inputs))
    if outputs[group.rank].numel() != inputs[group.rank].numel():
        raise CallError(
            f"all_to_all on {group}: this rank sends itself {inputs[group.rank].numel()} elements, "
            f"but expects {outputs[group.rank].numel()}"
        )


def check_nothing(group: Group, *args: Any) -> None:
    return None
