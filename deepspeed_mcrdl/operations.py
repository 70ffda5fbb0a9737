"""The catalogue: every communication operation is defined here once.

An operation knows its arguments, what must hold of them, the bytes it is routed by and its bandwidth formula.
Runtime, routing, logs, benchmarks and documentation read them here; nothing else knows a formula.

Conventions (those of nccl-tests): `size` is S in algbw = S / time, and busbw = algbw x busbw_factor(n) for n ranks.
Ranks in arguments (src, dst) are global ranks, as in torch.distributed. Arguments after the group:

=====================  =====================================================
all_reduce             tensor, op
reduce                 tensor, dst, op
broadcast              tensor, src
all_gather_into_tensor output, input
all_gather             outputs, input          (outputs may differ in size)
gather                 outputs or None, input, dst
gatherv                outputs or None, input, dst    (blocks may differ in size, which only the root knows)
scatter                output, inputs or None, src
scatterv               output, inputs or None, src    (blocks may differ in size, which only the root knows)
reduce_scatter_tensor  output, input, op
reduce_scatter         output, inputs, op      (inputs may differ in size)
all_to_all_single      output, input, output_splits, input_splits
all_to_all             outputs, inputs
send                   tensor, dst, tag
recv                   tensor, src or None, tag
barrier                (none)
=====================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_mcrdl.checks import (
    Tensors,
    block_check,
    check_all_gather,
    check_all_to_all,
    check_all_to_all_single,
    check_gather,
    check_gatherv,
    check_nothing,
    check_reduce_scatter,
    check_scatter,
    check_scatterv,
    tensor_check,
)
from deepspeed_mcrdl.groups import Group

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


def _no_root(*args: Any) -> int | None:
    return None


@dataclass(frozen=True, eq=False)
class Operation:
    """One entry of the catalogue. Compared by identity, so that it is a fast part of a dict key.

    Attributes:
        name: torch.distributed's name.
        family: the name under which a routing rule covers it together with its other forms.
        reduces: whether it has a reduce operation.
        busbw_factor: n -> factor from algbw to busbw, which is also wire bytes per rank / `size`.
        signature: arguments -> the part of the route key that they give (cheap; called on every call).
        tensors: arguments -> (inputs, outputs); a tensor in both is updated in place.
        size: (group, arguments) -> S in bytes, as this rank knows it.
        check: (group, arguments) -> None, or raises CallError.
        checked_once: arguments -> whether the signature covers all that `check` looks at, so that a call with a
            signature seen before needs no check.
        agreed: arguments -> whether every rank of the group knows the same `size`.
        collective: whether every rank of the group takes part, rather than two.
        root: arguments -> the root's global rank, None if there is none.
        same: (group, arguments) -> what must be the same on every rank of the group, besides the operation.
        blocks: (group, arguments) -> elements that this rank sends to each member, and that it receives from each; None
            where `same` says it all, or this rank does not know.
    """

    name: str
    family: str
    reduces: bool
    busbw_factor: Callable[[int], float]
    signature: Callable[..., tuple[Any, ...]]
    tensors: Callable[..., tuple[Tensors, Tensors]]
    size: Callable[..., int]
    check: Callable[..., None]
    checked_once: Callable[..., bool] = lambda *args: True
    agreed: Callable[..., bool] = lambda *args: True
    collective: bool = True
    root: Callable[..., int | None] = _no_root
    same: Callable[..., tuple[Any, ...]] = lambda group, *args: ()
    blocks: Callable[..., tuple[list[int] | None, list[int] | None]] = lambda group, *args: (None, None)

    def routed_bytes(self, group: Group, args: tuple[Any, ...]) -> int | None:
        """Return the bytes to route by: a number that all ranks of the group know to be equal, else None."""
        return self.size(group, *args) if self.agreed(*args) else None

    @property
    def rooted(self) -> bool:
        """Whether one rank's part differs from the others', so that a rank need not wait for all."""
        return self.root is not _no_root

    def __repr__(self) -> str:
        return self.name


def nbytes(tensors: Tensors) -> int:
    """Return the bytes of all elements of `tensors`."""
    return sum([t.nbytes for t in tensors])


# --- busbw factors ---


def _one(n: int) -> float:
    return 1.0


def _all_but_own(n: int) -> float:
    return (n - 1) / n


def _twice_all_but_own(n: int) -> float:
    return 2 * (n - 1) / n


# --- signatures: everything that the choice of a route and the check of fixed shapes depend on ---


def _tensor_signature(tensor: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.numel(), tensor.is_cpu, tensor.is_contiguous()


def _all_reduce_signature(tensor: torch.Tensor, op: str) -> tuple[Any, ...]:
    return tensor.dtype, tensor.numel(), tensor.is_cpu, tensor.is_contiguous(), op


def _reduce_signature(tensor: torch.Tensor, dst: int, op: str) -> tuple[Any, ...]:
    return tensor.dtype, tensor.numel(), tensor.is_cpu, tensor.is_contiguous(), op


def _pair_signature(output: torch.Tensor, input: torch.Tensor, op: str | None = None) -> tuple[Any, ...]:
    return (
        input.dtype,
        input.numel(),
        input.is_cpu,
        input.is_contiguous() and output.is_contiguous(),
        output.dtype,
        output.numel(),
        output.is_cpu,
        op,
    )


def _all_to_all_single_signature(
    output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any
) -> tuple[Any, ...]:
    return _pair_signature(output, input, "even" if output_splits is None and input_splits is None else "splits")


def _even(output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any) -> bool:
    return output_splits is None and input_splits is None


def _list_signature(tensors: Tensors, op: str | None = None) -> tuple[Any, ...]:
    return (
        tensors[0].dtype if tensors else None,
        sum(t.numel() for t in tensors),
        all(t.is_cpu for t in tensors),
        all(t.is_contiguous() for t in tensors),
        op,
    )


def _sizes(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def counts(tensor: torch.Tensor, rows: Sequence[int] | None, size: int, total: int | None = None) -> list[int]:
    """Return the elements for each rank of an all-to-all with split sizes.

    Args:
        tensor: the tensor that is split.
        rows: split sizes in rows; None: even.
        size: number of ranks.
        total: elements to count instead of the tensor's own, if it is sent as another dtype.
    """
    total = tensor.numel() if total is None else total
    if rows is None:
        return [total // size] * size
    width = total // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [count * width for count in rows]


# --- the catalogue ---

ALL_REDUCE = Operation(
    name="all_reduce",
    family="all_reduce",
    reduces=True,
    busbw_factor=_twice_all_but_own,
    signature=_all_reduce_signature,
    tensors=lambda tensor, op: ((tensor,), (tensor,)),
    size=lambda group, tensor, op: tensor.nbytes,
    check=tensor_check("all_reduce"),
    same=lambda group, tensor, op: (tensor.dtype, tuple(tensor.shape), op),
)
REDUCE = Operation(
    name="reduce",
    family="reduce",
    reduces=True,
    busbw_factor=_one,
    signature=_reduce_signature,
    tensors=lambda tensor, dst, op: ((tensor,), (tensor,)),
    size=lambda group, tensor, dst, op: tensor.nbytes,
    check=tensor_check("reduce"),
    root=lambda tensor, dst, op: dst,
    same=lambda group, tensor, dst, op: (tensor.dtype, tuple(tensor.shape), dst, op),
)
BROADCAST = Operation(
    name="broadcast",
    family="broadcast",
    reduces=False,
    busbw_factor=_one,
    signature=_tensor_signature,
    tensors=lambda tensor, src: ((tensor,), (tensor,)),
    size=lambda group, tensor, src: tensor.nbytes,
    check=tensor_check("broadcast"),
    root=lambda tensor, src: src,
    same=lambda group, tensor, src: (tensor.dtype, tuple(tensor.shape), src),
)
ALL_GATHER_INTO_TENSOR = Operation(
    name="all_gather_into_tensor",
    family="all_gather",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=_pair_signature,
    tensors=lambda output, input: ((input,), (output,)),
    size=lambda group, output, input: output.nbytes,
    check=block_check("all_gather_into_tensor", large_output=True),
    same=lambda group, output, input: (input.dtype, input.numel()),
)
ALL_GATHER = Operation(
    name="all_gather",
    family="all_gather",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda outputs, input: _list_signature((*outputs, input)),
    tensors=lambda outputs, input: ((input,), outputs),
    size=lambda group, outputs, input: nbytes(outputs),
    check=check_all_gather,
    checked_once=lambda *args: False,
    same=lambda group, outputs, input: (input.dtype, _sizes(outputs)),
)
GATHER = Operation(
    name="gather",
    family="gather",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda outputs, input, dst: _list_signature((input, *(outputs or ())), "root" if outputs else None),
    tensors=lambda outputs, input, dst: ((input,), outputs or ()),
    size=lambda group, outputs, input, dst: input.nbytes * group.size,
    check=check_gather,
    checked_once=lambda *args: False,
    root=lambda outputs, input, dst: dst,
    same=lambda group, outputs, input, dst: (input.dtype, input.numel(), dst),
)
GATHERV = Operation(
    name="gatherv",
    family="gather",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda outputs, input, dst: _list_signature((input, *(outputs or ())), "root" if outputs else None),
    tensors=lambda outputs, input, dst: ((input,), outputs or ()),
    size=lambda group, outputs, input, dst: nbytes(outputs or (input,)),
    check=check_gatherv,
    checked_once=lambda *args: False,
    agreed=lambda *args: False,
    root=lambda outputs, input, dst: dst,
    same=lambda group, outputs, input, dst: (input.dtype, dst),
    blocks=lambda group, outputs, input, dst: (
        [input.numel() if rank == dst else 0 for rank in group.ranks],
        _sizes(outputs) if group.ranks[group.rank] == dst else [0] * group.size,
    ),
)
SCATTER = Operation(
    name="scatter",
    family="scatter",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda output, inputs, src: _list_signature((output, *(inputs or ())), "root" if inputs else None),
    tensors=lambda output, inputs, src: (inputs or (), (output,)),
    size=lambda group, output, inputs, src: output.nbytes * group.size,
    check=check_scatter,
    checked_once=lambda *args: False,
    root=lambda output, inputs, src: src,
    same=lambda group, output, inputs, src: (output.dtype, output.numel(), src),
)
SCATTERV = Operation(
    name="scatterv",
    family="scatter",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda output, inputs, src: _list_signature((output, *(inputs or ())), "root" if inputs else None),
    tensors=lambda output, inputs, src: (inputs or (), (output,)),
    size=lambda group, output, inputs, src: nbytes(inputs or (output,)),
    check=check_scatterv,
    checked_once=lambda *args: False,
    agreed=lambda *args: False,
    root=lambda output, inputs, src: src,
    same=lambda group, output, inputs, src: (output.dtype, src),
    blocks=lambda group, output, inputs, src: (
        _sizes(inputs) if group.ranks[group.rank] == src else [0] * group.size,
        [output.numel() if rank == src else 0 for rank in group.ranks],
    ),
)
REDUCE_SCATTER_TENSOR = Operation(
    name="reduce_scatter_tensor",
    family="reduce_scatter",
    reduces=True,
    busbw_factor=_all_but_own,
    signature=_pair_signature,
    tensors=lambda output, input, op: ((input,), (output,)),
    size=lambda group, output, input, op: input.nbytes,
    check=block_check("reduce_scatter_tensor", large_output=False),
    same=lambda group, output, input, op: (input.dtype, input.numel(), op),
)
REDUCE_SCATTER = Operation(
    name="reduce_scatter",
    family="reduce_scatter",
    reduces=True,
    busbw_factor=_all_but_own,
    signature=lambda output, inputs, op: _list_signature((*inputs, output), op),
    tensors=lambda output, inputs, op: (inputs, (output,)),
    size=lambda group, output, inputs, op: nbytes(inputs),
    check=check_reduce_scatter,
    checked_once=lambda *args: False,
    same=lambda group, output, inputs, op: (output.dtype, _sizes(inputs), op),
)
ALL_TO_ALL_SINGLE = Operation(
    name="all_to_all_single",
    family="all_to_all",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=_all_to_all_single_signature,
    tensors=lambda output, input, output_splits, input_splits: ((input,), (output,)),
    size=lambda group, output, input, output_splits, input_splits: input.nbytes,
    check=check_all_to_all_single,
    checked_once=_even,
    # With split sizes each rank knows only its own row of the matrix of sizes.
    agreed=_even,
    # A rank that gives split sizes takes another route than one that gives none, even where the sizes are equal.
    same=lambda group, *args: (args[1].dtype, args[1].numel() if _even(*args) else "split sizes"),
    blocks=lambda group, output, input, output_splits, input_splits: (
        (None, None)
        if _even(output, input, output_splits, input_splits)
        else (counts(input, input_splits, group.size), counts(output, output_splits, group.size))
    ),
)
ALL_TO_ALL = Operation(
    name="all_to_all",
    family="all_to_all",
    reduces=False,
    busbw_factor=_all_but_own,
    signature=lambda outputs, inputs: _list_signature((*outputs, *inputs)),
    tensors=lambda outputs, inputs: (inputs, outputs),
    size=lambda group, outputs, inputs: nbytes(inputs),
    check=check_all_to_all,
    checked_once=lambda *args: False,
    agreed=lambda outputs, inputs: False,
    same=lambda group, outputs, inputs: (outputs[0].dtype,),
    blocks=lambda group, outputs, inputs: (_sizes(inputs), _sizes(outputs)),
)
SEND = Operation(
    name="send",
    family="send_recv",
    reduces=False,
    busbw_factor=_one,
    signature=_tensor_signature,
    tensors=lambda tensor, dst, tag: ((tensor,), ()),
    size=lambda group, tensor, dst, tag: tensor.nbytes,
    check=tensor_check("send"),
    collective=False,
)
RECV = Operation(
    name="recv",
    family="send_recv",
    reduces=False,
    busbw_factor=_one,
    signature=_tensor_signature,
    tensors=lambda tensor, src, tag: ((), (tensor,)),
    size=lambda group, tensor, src, tag: tensor.nbytes,
    check=tensor_check("recv"),
    collective=False,
)
BARRIER = Operation(
    name="barrier",
    family="barrier",
    reduces=False,
    busbw_factor=_one,
    signature=lambda: (),
    tensors=lambda: ((), ()),
    size=lambda group: 0,
    check=check_nothing,
)

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        ALL_REDUCE,
        REDUCE,
        BROADCAST,
        ALL_GATHER_INTO_TENSOR,
        ALL_GATHER,
        GATHER,
        GATHERV,
        SCATTER,
        SCATTERV,
        REDUCE_SCATTER_TENSOR,
        REDUCE_SCATTER,
        ALL_TO_ALL_SINGLE,
        ALL_TO_ALL,
        SEND,
        RECV,
        BARRIER,
    )
}

# The names that a routing rule may use. Both ends of a message must take one backend, so send and recv have one name.
RULE_NAMES: frozenset[str] = frozenset(
    {operation.family for operation in OPERATIONS.values()} | (set(OPERATIONS) - {"send", "recv"})
)
