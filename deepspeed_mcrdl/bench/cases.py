"""Calls whose results are known: one for each operation of the catalogue, of a wanted size, with small whole numbers.

Every rank's data differ from the others' and from place to place, sums are exact in every dtype, and before each call
the place of the result is overwritten, so that a call that did nothing, too little or the wrong thing is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.errors import ConfigError, suggest
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import OPERATIONS, Operation

MESSAGES = "send_recv"
_LARGEST = 5  # so that sums of 50 ranks are exact in bfloat16

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
    )
}


class Issue(Protocol):
    """Carries a call in some way: with `async_op` it returns a handle with wait(), else when the call is done."""

    def __call__(self, operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any: ...


@dataclass(frozen=True)
class Case:
    """One measurable unit: a collective, or a message sent on around the ring while another is received.

    Attributes:
        name: an operation's name, or "send_recv".
        operation: the entry of the catalogue whose formulas hold.
        bytes: S of the formulas.
        count: elements of S.
        dtype: of the tensors; None if there are none.
        op: reduce operation; None if there is none.
        calls: the operations and their arguments.
        prepare: restores the inputs and spoils the outputs.
        right: whether the result is right on this rank.
    """

    name: str
    operation: Operation
    bytes: int
    count: int
    dtype: torch.dtype | None
    op: str | None
    calls: tuple[tuple[Operation, tuple[Any, ...]], ...]
    prepare: Callable[[], object]
    right: Callable[[], bool]

    def start(self, issue: Issue) -> list[Any]:
        """Issue the calls asynchronously and return their handles."""
        return [issue(operation, args, True) for operation, args in self.calls]

    def run(self, issue: Issue) -> None:
        """Issue the calls and return when they are done."""
        if len(self.calls) == 1:
            issue(*self.calls[0])
            return
        for handle in self.start(issue):
            handle.wait()


def case_names() -> list[str]:
    """Return the names of all cases."""
    return [name for name in OPERATIONS if name not in ("send", "recv")] + [MESSAGES]


def chosen(names: Sequence[str]) -> list[str]:
    """Return `names`, or all for ["all"].

    Raises:
        ConfigError: on an unknown name, with the right word.
    """
    known = case_names()
    if list(names) == ["all"]:
        return known
    for name in names:
        if name not in known:
            raise ConfigError(f'unknown operation "{name}".{suggest(name, known)}')
    return list(names)


def make_case(name: str, group: Group, size: int, dtype: torch.dtype = torch.float32, op: str = "sum") -> Case:
    """Return the case of an operation on `group` with as near to `size` bytes as whole elements for all ranks allow."""
    builder = _Builder(group, size, dtype, op)
    operation = ops.SEND if name == MESSAGES else OPERATIONS[name]
    calls, restored, spoiled, expected = getattr(builder, name)()
    args = calls[0][1]

    def prepare() -> None:
        for tensor, original in restored:
            tensor.copy_(original)
        for tensor in spoiled:
            tensor.zero_()

    def right() -> bool:
        return all(torch.equal(_raw(tensor), _raw(wanted)) for tensor, wanted in expected)

    s = operation.size(group, *args)
    if name in ("gatherv", "scatterv"):
        s = builder.total * dtype.itemsize  # which only the root's arguments tell
    has_data = name != "barrier"
    return Case(
        name=name,
        operation=operation,
        bytes=s,
        count=s // dtype.itemsize,
        dtype=dtype if has_data else None,
        op=op if operation.reduces else None,
        calls=tuple(calls),
        prepare=prepare,
        right=right,
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Built = tuple[list[tuple[Operation, tuple[Any, ...]]], Pairs, list[torch.Tensor], Pairs]


class _Builder:
    """One method an operation: (calls, [(tensor, what it holds before)], [results to spoil], [(tensor, expected)])."""

    def __init__(self, group: Group, size: int, dtype: torch.dtype, op: str) -> None:
        self.n, self.me, self.ranks = group.size, group.rank, group.ranks
        self.dtype, self.op = dtype, op
        self.block = max(1, size // dtype.itemsize // group.size)
        self.total = self.block * group.size
        self.whole = max(1, size // dtype.itemsize)

    def data(self, index: int, count: int, start: int = 0) -> torch.Tensor:
        """Return elements of the data of the group's rank `index`."""
        numbers = (torch.arange(start, start + count) + 3 * index) % _LARGEST + 1
        return (numbers % 2 if self.dtype is torch.bool else numbers).to(self.dtype)

    def empty(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.dtype)

    def reduced(self, count: int) -> torch.Tensor:
        """Return what the reduce operation makes of all ranks' first `count` elements."""
        combine = _REDUCTIONS[self.op]
        everybody: Iterator[torch.Tensor] = (self.data(index, count).to(_exact(self.dtype)) for index in range(self.n))
        result = next(everybody)
        for other in everybody:
            result = combine(result, other)
        return (result / self.n if self.op == "avg" else result).to(self.dtype)

    def parts(self, counts: Sequence[int], index: int) -> list[torch.Tensor]:
        """Return the data of rank `index` cut into parts for each rank."""
        return list(torch.split(self.data(index, sum(counts)), list(counts)))

    def uneven(self) -> list[int]:
        """Return a part for each rank that grows with the rank, `total` together."""
        weights = self.n * (self.n + 1) // 2
        counts = [self.total * (index + 1) // weights for index in range(self.n)]
        counts[-1] += self.total - sum(counts)
        return counts

    def all_reduce(self) -> Built:
        tensor = self.empty(self.whole)
        args = (tensor, self.op)
        return (
            [(ops.ALL_REDUCE, args)],
            [(tensor, self.data(self.me, self.whole))],
            [],
            [(tensor, self.reduced(self.whole))],
        )

    def reduce(self) -> Built:
        tensor = self.empty(self.whole)
        expected = [(tensor, self.reduced(self.whole))] if self.me == 0 else []
        args = (tensor, self.ranks[0], self.op)
        return [(ops.REDUCE, args)], [(tensor, self.data(self.me, self.whole))], [], expected

    def broadcast(self) -> Built:
        tensor = self.empty(self.whole)
        return (
            [(ops.BROADCAST, (tensor, self.ranks[0]))],
            [(tensor, self.data(self.me, self.whole))],
            [],
            [(tensor, self.data(0, self.whole))],
        )

    def all_gather_into_tensor(self) -> Built:
        output, input = self.empty(self.total), self.data(self.me, self.block)
        expected = torch.cat([self.data(index, self.block) for index in range(self.n)])
        return [(ops.ALL_GATHER_INTO_TENSOR, (output, input))], [], [output], [(output, expected)]

    def all_gather(self) -> Built:
        outputs, input = [self.empty(self.block) for _ in range(self.n)], self.data(self.me, self.block)
        expected = [(output, self.data(index, self.block)) for index, output in enumerate(outputs)]
        return [(ops.ALL_GATHER, (outputs, input))], [], outputs, expected

    def gather(self) -> Built:
        return self._gather(ops.GATHER, [self.block] * self.n)

    def gatherv(self) -> Built:
        return self._gather(ops.GATHERV, self.uneven())

    def _gather(self, operation: Operation, counts: list[int]) -> Built:
        outputs = [self.empty(count) for count in counts] if self.me == 0 else None
        expected = [(output, self.data(index, output.numel())) for index, output in enumerate(outputs or ())]
        args = (outputs, self.data(self.me, counts[self.me]), self.ranks[0])
        return [(operation, args)], [], outputs or [], expected

    def scatter(self) -> Built:
        return self._scatter(ops.SCATTER, [self.block] * self.n)

    def scatterv(self) -> Built:
        return self._scatter(ops.SCATTERV, self.uneven())

    def _scatter(self, operation: Operation, counts: list[int]) -> Built:
        output = self.empty(counts[self.me])
        inputs = self.parts(counts, 0)
        args = (output, inputs if self.me == 0 else None, self.ranks[0])
        return [(operation, args)], [], [output], [(output, inputs[self.me])]

    def reduce_scatter_tensor(self) -> Built:
        output, input = self.empty(self.block), self.data(self.me, self.total)
        expected = self.reduced(self.total)[self.me * self.block :][: self.block]
        return [(ops.REDUCE_SCATTER_TENSOR, (output, input, self.op))], [], [output], [(output, expected)]

    def reduce_scatter(self) -> Built:
        output, inputs = self.empty(self.block), self.parts([self.block] * self.n, self.me)
        expected = self.reduced(self.total)[self.me * self.block :][: self.block]
        return [(ops.REDUCE_SCATTER, (output, inputs, self.op))], [], [output], [(output, expected)]

    def all_to_all_single(self) -> Built:
        output, input = self.empty(self.total), self.data(self.me, self.total)
        expected = torch.cat([self.data(index, self.block, self.me * self.block) for index in range(self.n)])
        return [(ops.ALL_TO_ALL_SINGLE, (output, input, None, None))], [], [output], [(output, expected)]

    def all_to_all(self) -> Built:
        outputs = [self.empty(self.block) for _ in range(self.n)]
        inputs = self.parts([self.block] * self.n, self.me)
        expected = [(out, self.data(index, self.block, self.me * self.block)) for index, out in enumerate(outputs)]
        return [(ops.ALL_TO_ALL, (outputs, inputs))], [], outputs, expected

    def send_recv(self) -> Built:
        output, input = self.empty(self.whole), self.data(self.me, self.whole)
        right, left = (self.me + 1) % self.n, (self.me - 1) % self.n
        calls = [(ops.SEND, (input, self.ranks[right], 0)), (ops.RECV, (output, self.ranks[left], 0))]
        return calls, [], [output], [(output, self.data(left, self.whole))]

    def barrier(self) -> Built:
        return [(ops.BARRIER, ())], [], [], []


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point or dtype.is_complex else torch.int64


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
