"""The matrix of calls: every operation of the catalogue on every backend, in every form, with the right result.

A cell is (operation, backend, dtype, reduce operation, form, asynchronous or not, group). Cells come from operations.py
and the backends' declarations, so a new backend is in the matrix by itself, and a new operation is missed by
`test_every_operation_is_in_the_matrix`. Results are computed by plain torch from what every rank sends, which each rank
knows by its seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_mcrdl.operations import OPERATIONS, REDUCE_OPS

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
# form -> shape of one rank's block
SHAPES = {
    "scalar": (),
    "empty": (0, 3),
    "odd": (7,),
    "transposed": (3, 5),
    "column": (5,),
    "channels last": (2, 3, 4, 4),
    "large": (20_011,),  # above the size that MPI sends without the receiver
}
UNEVEN_FORMS = ("uneven", "one idle", "all idle")
UNEVEN = frozenset({"all_gather", "gatherv", "scatterv", "reduce_scatter", "all_to_all", "all_to_all_single"})


class Cell(NamedTuple):
    """One call of the matrix."""

    operation: str
    backend: str
    dtype: torch.dtype
    op: str | None
    form: str
    async_op: bool
    sub_group: bool
    salt: int = 0  # other values for otherwise equal cells

    def __str__(self) -> str:
        parts = [self.operation, self.op, str(self.dtype).removeprefix("torch."), self.form, f"by {self.backend}"]
        parts += ["asynchronous" if self.async_op else None, "on a sub-group" if self.sub_group else None]
        return " ".join(part for part in parts if part)


def cells(operation: str, backends: Sequence[str]) -> Iterator[Cell]:
    """Yield all cells of an operation."""
    if operation == "barrier":
        for backend, async_op, sub in itertools.product(backends, (False, True), (False, True)):
            yield Cell(operation, backend, torch.float32, None, "odd", async_op, sub)
        return
    reduce_ops = REDUCE_OPS if OPERATIONS[operation].reduces else (None,)
    forms = [*SHAPES, *(UNEVEN_FORMS if operation in UNEVEN else ())]
    for values in itertools.product([operation], backends, DTYPES, reduce_ops, forms, (False, True), (False, True)):
        yield Cell(*values)


class Made(NamedTuple):
    """A rank's part of a cell.

    Attributes:
        args: arguments of the operation, None if this rank has no part in it.
        results: (tensor, what it must hold afterwards).
    """

    args: tuple[Any, ...] | None
    results: list[tuple[torch.Tensor, torch.Tensor]]


def make(cell: Cell, members: list[int], me: int) -> Made:
    """Return the part of the member at place `me` of a cell on the global ranks `members`."""
    return RECIPES[cell.operation](cell, members, me)


def verify(cell: Cell, made: Made) -> None:
    """Fail if a tensor does not hold what it must, bit by bit."""
    for got, wanted in made.results:
        assert got.dtype == wanted.dtype == cell.dtype
        assert torch.equal(_bits(got), _bits(wanted)), f"{cell}: got {got.tolist()}, wanted {wanted.tolist()}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1).float()


def _values(cell: Cell, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return small numbers, so that all sums and products of a few ranks are exact."""
    generator = torch.Generator().manual_seed(1000 * cell.salt + seed)
    numbers = torch.randint(
        0 if cell.dtype is torch.bool else 1, 2 if cell.dtype is torch.bool else 4, shape, generator=generator
    )
    return numbers.to(torch.float32).to(cell.dtype)


def _laid(cell: Cell, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values, in the memory layout of the cell's form."""
    if cell.form == "transposed" and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    if cell.form == "column" and tensor.dim():
        wide = torch.zeros(*tensor.shape, 3, dtype=tensor.dtype)
        wide[..., 1].copy_(tensor)
        return wide[..., 1]
    if cell.form == "channels last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _space(cell: Cell, like: torch.Tensor) -> torch.Tensor:
    return _laid(cell, torch.zeros_like(like))


def _blocks(cell: Cell, n: int) -> list[torch.Tensor]:
    """Return what each member has: a block of the form's shape, or of another length for each member."""
    if cell.form in UNEVEN_FORMS:
        return [_values(cell, (_length(cell, i), 2), i) for i in range(n)]
    return [_values(cell, SHAPES[cell.form], i) for i in range(n)]


def _length(cell: Cell, i: int) -> int:
    return {"uneven": i + 1, "one idle": 2 * i, "all idle": 0}[cell.form]


def _reduced(cell: Cell, tensors: list[torch.Tensor]) -> torch.Tensor:
    result = tensors[0].clone()
    for other in tensors[1:]:
        result = _COMBINE[cell.op](result, other)
    if cell.op == "avg":
        parts = torch.view_as_real(result) if result.is_complex() else result
        result = (parts / len(tensors)).view(result.dtype).view(result.shape)
    return result


_COMBINE: dict[str | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": lambda a, b: torch.minimum(a, b),
    "max": lambda a, b: torch.maximum(a, b),
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _all_reduce(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    tensor = _laid(cell, blocks[me].clone())
    return Made((tensor, cell.op), [(tensor, _reduced(cell, blocks))])


def _reduce(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    tensor = _laid(cell, blocks[me].clone())
    root = len(members) - 1
    return Made((tensor, members[root], cell.op), [(tensor, _reduced(cell, blocks))] if me == root else [])


def _broadcast(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    tensor = _laid(cell, blocks[me].clone())
    return Made((tensor, members[-1]), [(tensor, blocks[-1])])


def _all_gather_into_tensor(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    wanted = torch.stack(blocks)
    output = _space(cell, wanted)
    return Made((output, _laid(cell, blocks[me])), [(output, wanted)])


def _all_gather(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    outputs = [_space(cell, block) for block in blocks]
    return Made((outputs, _laid(cell, blocks[me])), list(zip(outputs, blocks, strict=True)))


def _gather(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    root = len(members) - 1
    outputs = [_space(cell, block) for block in blocks] if me == root else None
    results = list(zip(outputs, blocks, strict=True)) if outputs else []
    return Made((outputs, _laid(cell, blocks[me]), members[root]), results)


def _scatter(cell: Cell, members: list[int], me: int) -> Made:
    blocks = _blocks(cell, len(members))
    root = len(members) - 1
    output = _space(cell, blocks[me])
    inputs = [_laid(cell, block) for block in blocks] if me == root else None
    return Made((output, inputs, members[root]), [(output, blocks[me])])


def _reduce_scatter_tensor(cell: Cell, members: list[int], me: int) -> Made:
    n = len(members)
    inputs = [_values(cell, (n, *SHAPES[cell.form]), i) for i in range(n)]
    wanted = _reduced(cell, inputs)[me]
    output = _space(cell, wanted)
    return Made((output, _laid(cell, inputs[me]), cell.op), [(output, wanted)])


def _reduce_scatter(cell: Cell, members: list[int], me: int) -> Made:
    n = len(members)
    shapes = [tuple(block.shape) for block in _blocks(cell, n)]
    inputs = [[_values(cell, shapes[j], 10 * i + j) for j in range(n)] for i in range(n)]
    wanted = _reduced(cell, [inputs[i][me] for i in range(n)])
    output = _space(cell, wanted)
    return Made((output, [_laid(cell, t) for t in inputs[me]], cell.op), [(output, wanted)])


def _all_to_all_single(cell: Cell, members: list[int], me: int) -> Made:
    n = len(members)
    if cell.form in UNEVEN_FORMS:
        rows = [[_rows(cell, i, j) for j in range(n)] for i in range(n)]
        inputs = [_values(cell, (sum(rows[i]), 2), i) for i in range(n)]
        wanted = torch.cat([inputs[i].split(rows[i])[me] for i in range(n)])
        output = torch.zeros_like(wanted)
        return Made((output, inputs[me], [rows[i][me] for i in range(n)], rows[me]), [(output, wanted)])
    inputs = [_values(cell, (n, *SHAPES[cell.form]), i) for i in range(n)]
    wanted = torch.stack([inputs[i][me] for i in range(n)])
    output = _space(cell, wanted)
    return Made((output, _laid(cell, inputs[me]), None, None), [(output, wanted)])


def _rows(cell: Cell, i: int, j: int) -> int:
    return {"uneven": (i + 2 * j) % 3, "one idle": 0 if i == 0 else i + j, "all idle": 0}[cell.form]


def _all_to_all(cell: Cell, members: list[int], me: int) -> Made:
    n = len(members)

    def part(i: int, j: int) -> torch.Tensor:
        shape = (_rows(cell, i, j), 2) if cell.form in UNEVEN_FORMS else SHAPES[cell.form]
        return _values(cell, shape, 10 * i + j)

    inputs = [_laid(cell, part(me, j)) for j in range(n)]
    wanted = [part(i, me) for i in range(n)]
    outputs = [_space(cell, t) for t in wanted]
    return Made((outputs, inputs), list(zip(outputs, wanted, strict=True)))


def _message(cell: Cell, members: list[int], me: int) -> Made:
    """A message from the first member to the last; the recv cells receive from any rank.

    They have a tag of their own: gloo keeps no order between receives from any and from a certain rank.
    """
    tag = 3 if cell.operation == "send" else 4
    block = _blocks(cell, 1)[0]
    if len(members) == 1 or me not in (0, len(members) - 1):
        return Made(None, [])
    if me == 0:
        return Made((_laid(cell, block), members[-1], tag), [])
    tensor = _space(cell, block)
    return Made((tensor, members[0] if cell.operation == "send" else None, tag), [(tensor, block)])


def _barrier(cell: Cell, members: list[int], me: int) -> Made:
    return Made((), [])


RECIPES: dict[str, Callable[[Cell, list[int], int], Made]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "gather": _gather,
    "gatherv": _gather,
    "scatter": _scatter,
    "scatterv": _scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "send": _message,
    "recv": _message,
    "barrier": _barrier,
}
