"""Chunks: a large all_reduce or all_to_all_single is carried as many small ones, a few of them under way at once.

Two things can be won. A pair of backends ("shm+mpi") works on one chunk within the host while the one before it is
between hosts. And other calls need not wait until a large one is over: an all-to-all goes first. Experts wait for
tokens, while a gradient is needed at the end of the step only (Lina: Accelerating Distributed MoE Training and
Inference, USENIX ATC 2023), so while an all-to-all is under way on a rank, no chunk of an all_reduce is started there.

This is for a bounded time only: the all-to-all may wait for a rank that waits for the all_reduce. It may go by each
rank's own clock, since the chunks of an operation on a group by one backend form a *lane* with a communicator of its
own: when they start does not matter there, only in which order.

How many chunks a call has follows from its bytes. With split sizes no rank knows all of them, so the ranks settle it
by an all_reduce of the maximum (the *header*), which is under way together with the first chunk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import Backend, apart, joined, spread
from deepspeed_mcrdl.config import PAIR, ChunkBlock
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.operations import Operation, counts
from deepspeed_mcrdl.routing.table import Lookup
from deepspeed_mcrdl.safety import Progress
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.transforms.lanes import Lane, Lanes
from deepspeed_mcrdl.transforms.steps import Fit
from deepspeed_mcrdl.work import DONE, Pending, Then

BYTES = 2**20  # of a chunk, where neither config nor table says
_UNDER_WAY = 2
_NAP_S = 50e-6
_HOLD_S = 0.02  # how long an all-to-all without progress holds back all_reduces
_ALIGNMENT = 64  # bytes, of a chunk's place
_HEADER_OP = "max"

Carry = Callable[..., Pending]


class _Urgent:
    """The all-to-alls that are under way on this rank."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    def add(self, pending: Pending) -> Pending:
        """Return `pending`, noted until it is done."""
        if pending is DONE:
            return pending
        note = object()
        self._since[note] = time.monotonic()

        def done() -> None:
            self._since.pop(note, None)

        return Then(pending, done)

    def progressed(self) -> None:
        """A part of one is done."""
        now = time.monotonic()
        for note in tuple(self._since):
            if note in self._since:
                self._since[note] = now

    def hold(self) -> bool:
        """Return whether others are to wait."""
        long_ago = time.monotonic() - _HOLD_S
        for note, since in tuple(self._since.items()):
            if since < long_ago:
                self._since.pop(note, None)
        return bool(self._since)


class _Cut:
    """How a call is cut. A subclass has `start`.

    Attributes:
        chunks: number of operations, None as long as it is not known.
        ready: how many of them may be started by now.
    """

    chunks: int | None
    ready: int

    def start(self, number: int, carry: Carry) -> Pending:
        """Start an operation; `carry` (operation, *arguments) starts it on the lane's communicator."""
        raise NotImplementedError


class _Sum(_Cut):
    """An all_reduce, cut into parts of the tensor."""

    def __init__(self, chunk_bytes: int, group: Group, tensor: torch.Tensor, op: str) -> None:
        self._flat, self._op = tensor.detach().view(-1), op
        self._each = _even_part(self._flat.nbytes, chunk_bytes) // tensor.itemsize
        self.chunks = self.ready = -(-self._flat.numel() // self._each)

    def start(self, number: int, carry: Carry) -> Pending:
        return carry(ops.ALL_REDUCE, self._flat[number * self._each :][: self._each], self._op)


class _EvenExchange(_Cut):
    """An all_to_all_single of equal blocks, cut into a part of each block."""

    def __init__(
        self, chunk_bytes: int, group: Group, output: torch.Tensor, input: torch.Tensor, *splits: None
    ) -> None:
        source, self._target = (_bytes(tensor).view(group.size, -1) for tensor in (apart(input, (output,)), output))
        self._source = source
        self._each = _even_part(source.shape[1], max(chunk_bytes // group.size, 1))
        self.chunks = self.ready = -(-source.shape[1] // self._each)

    def start(self, number: int, carry: Carry) -> Pending:
        part = slice(number * self._each, (number + 1) * self._each)
        sent, target = self._source[:, part], self._target[:, part]
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        pending = carry(ops.ALL_TO_ALL_SINGLE, received.view(-1), sent.reshape(-1), None, None)

        def put() -> None:
            target.copy_(received)

        return Then(pending, put)


class _SplitExchange(_Cut):
    """An all_to_all_single with split sizes: the header, then parts of the blocks, which not all ranks need."""

    chunks = None
    ready = 2

    def __init__(
        self,
        chunk_bytes: int,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> None:
        self._source, self._target = _bytes(apart(input, (output,))), _bytes(output)
        self._given = [count * input.itemsize for count in counts(input, input_splits, group.size)]
        self._taken = [count * output.itemsize for count in counts(output, output_splits, group.size)]
        self._each = _aligned(chunk_bytes // group.size)
        self._most = max(*self._given, *self._taken)

    def start(self, number: int, carry: Carry) -> Pending:
        if number == 0:
            told = torch.tensor([max(-(-self._most // self._each), 1)])
            return Then(carry(ops.ALL_REDUCE, told, _HEADER_OP), lambda: self._hear(told))
        first = (number - 1) * self._each
        taken, given = ([min(max(size - first, 0), self._each) for size in all] for all in (self._taken, self._given))
        if self._most <= self._each:
            return carry(ops.ALL_TO_ALL_SINGLE, self._target[: sum(taken)], self._source[: sum(given)], taken, given)
        sent = joined(_parts(self._source, self._given, first, given))
        targets = _parts(self._target, self._taken, first, taken)
        received = sent.new_empty(sum(taken))
        pending = carry(ops.ALL_TO_ALL_SINGLE, received, sent, taken, given)
        return Then(pending, lambda: spread(received, targets))

    def _hear(self, told: torch.Tensor) -> None:
        self.chunks = self.ready = 1 + int(told.item())


class _Call(Pending):
    """A call that its lane carries in chunks."""

    host_driven = True

    def __init__(self, lane: _Lane, cut: _Cut) -> None:
        self._lane = lane
        self.cut = cut
        self.started = self.ended = 0

    @property
    def done(self) -> bool:
        """Whether all its operations are done."""
        return self.ended == self.cut.chunks

    def poll(self) -> bool:
        if not self.done:
            self._lane.advance()
            self.yields_s = self._lane.yields_s
            if not self.done:
                self._lane.require()
        return self.done

    def block(self, limit_s: float) -> None:
        self._lane.block(limit_s)


class _Lane(Lane):
    """The chunked calls of one operation on a group by one backend.

    Args:
        carry: (operation, *arguments) -> Pending, on a communicator that has no other calls.
        hold: whether no chunk is to be started now.
        progressed: called when a chunk is done.
    """

    def __init__(self, carry: Carry, hold: Callable[[], bool], progressed: Callable[[], None]) -> None:
        super().__init__()
        self._carry, self._hold, self._progressed = carry, hold, progressed
        self._calls: deque[_Call] = deque()  # not all of whose operations have been started
        self._under_way: list[tuple[_Call, Pending]] = []
        self.yields_s = Pending.yields_s

    def issue(self, cut: _Cut) -> Pending:
        """Take a call up. The ranks issue those of a lane in one order."""
        self.require()
        call = _Call(self, cut)
        self.note()
        self._calls.append(call)
        self.advance()
        return call

    def _move(self) -> None:
        for entry in tuple(self._under_way):
            call, pending = entry
            if pending.poll():
                self._under_way.remove(entry)
                call.ended += 1
                self.note()
                self._progressed()
        while self._calls and len(self._under_way) < _UNDER_WAY:
            call = self._calls[0]
            if call.started == call.cut.chunks:
                self._calls.popleft()
            elif call.started < call.cut.ready and not self._hold():
                pending = call.cut.start(call.started, self._carry)
                call.started += 1
                self._under_way.append((call, pending))
                self.yields_s = pending.yields_s
            else:
                break

    def block(self, limit_s: float) -> None:
        """Sleep until something may be done, for at most `limit_s` seconds."""
        under_way = self._under_way[:1]
        if under_way:
            under_way[0][1].block(limit_s)
        else:
            time.sleep(min(limit_s, _NAP_S))

    @property
    def idle(self) -> bool:
        return not (self._calls or self._under_way)

    def require(self) -> None:
        """Raise the error that the lane has ended with, if it has."""
        if self._error is not None:
            raise self._error

    def end(self, error: Exception) -> None:
        self._error = self._error or error


class Chunks:
    """The lanes of this process.

    Args:
        block: which calls are cut.
        table: the tuning table in use, if there is one.
        groups: the groups of the job.
        progress: who waits.
        fit: gives the method that carries a chunk.
    """

    def __init__(self, block: ChunkBlock, table: Lookup | None, groups: Groups, progress: Progress, fit: Fit) -> None:
        self._block, self._table, self._groups, self._fit = block, table, groups, fit
        self._urgent = _Urgent()
        self._lanes: Lanes[_Lane] = Lanes(groups, progress)

    def bytes(self, backend: Backend, operation: Operation, group: Group) -> int | None:
        """Return the size of a chunk; None: such calls are not cut. All ranks of the group say the same."""
        if operation.name not in self._block.operations or group.size == 1 or backend.misfit(group.mesh) is not None:
            return None
        if backend.lacks(operation, torch.float32, "cpu", "sum" if operation.reduces else None) is not None:
            return None
        if self._block.max_bytes is not None:
            return self._block.max_bytes
        entry = None if self._table is None else self._table.chunk(operation, backend.name, group.mesh)
        if entry is not None:
            return entry.max_bytes
        return BYTES if PAIR in backend.name else None

    def groups_of(self, backend: Backend, group: Group) -> list[Group]:
        """Return the Groups whose communicators carry the chunks of `group` by `backend`; every member makes them."""
        return [
            self._lanes.group_of(backend, group, _what(operation))
            for operation in (ops.ALL_REDUCE, ops.ALL_TO_ALL_SINGLE)
            if self.bytes(backend, operation, group) is not None
        ]

    def method(
        self, backend: Backend, operation: Operation, group: Group, args: tuple[Any, ...]
    ) -> Callable[..., Pending] | None:
        """Return what carries calls like this one by `backend`, which has joined its `groups_of`, in chunks; None: they
        are not cut. All ranks of the group say the same."""
        chunk_bytes = self.bytes(backend, operation, group)
        inputs, outputs = operation.tensors(*args)
        if chunk_bytes is None or any(tensor.device.type != "cpu" for tensor in (*inputs, *outputs)):
            return None
        size = operation.routed_bytes(group, args)
        cut: Callable[..., _Cut]
        if size is None:
            if backend.lacks(ops.ALL_REDUCE, torch.int64, "cpu", _HEADER_OP) is not None:
                return None
            cut = _SplitExchange
        elif size < self._block.min_call_bytes or size <= chunk_bytes:
            return None
        elif operation is ops.ALL_REDUCE:
            cut = _Sum
        else:
            cut = _EvenExchange
        lane = self._lane(backend, operation, group)

        def call(group: Group, *args: Any) -> Pending:
            return lane.issue(cut(chunk_bytes, group, *args))

        strided = not all(tensor.is_contiguous() for tensor in (*inputs, *outputs))
        return through_contiguous(operation, call) if strided else call

    def _lane(self, backend: Backend, operation: Operation, group: Group) -> _Lane:
        def make(own: Group) -> _Lane:
            def carry(operation: Operation, *args: Any) -> Pending:
                return self._fit(backend, operation, own, args)(own, *args)

            if operation is ops.ALL_REDUCE:
                return _Lane(carry, self._urgent.hold, lambda: None)
            return _Lane(carry, lambda: False, self._urgent.progressed)

        return self._lanes.lane(backend, group, _what(operation), make)

    def first(self, ways: Iterable[Backend], method: Callable[..., Pending]) -> Callable[..., Pending]:
        """Return `method`, of an all-to-all, so that its calls hold back chunks of all_reduces, if `ways` have any."""
        if all(self.bytes(way, ops.ALL_REDUCE, self._groups.world) is None for way in ways):
            return method
        add = self._urgent.add
        return lambda group, *args: add(method(group, *args))

    def leave(self, group: Group) -> list[Group]:
        """End the lanes of a group that is being destroyed, and return the Groups made for it."""
        return self._lanes.leave(group)

    def close(self) -> None:
        """End all lanes."""
        self._lanes.close()


def _what(operation: Operation) -> str:
    return f"{operation.name} in chunks"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT


def _even_part(whole: int, most: int) -> int:
    """Return the bytes of the parts that `whole` is cut into, nearly equal ones of about at most `most`."""
    return _aligned(-(-whole // -(-whole // most)))


def _parts(whole: torch.Tensor, sizes: Sequence[int], first: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return of each of the blocks of `sizes` so many elements, from element `first` of the block on."""
    return [block[first:][:length] for block, length in zip(torch.split(whole, list(sizes)), lengths, strict=True)]
