"""Tensor fusion: small calls on a group are collected and carried together, one operation for each kind of call.

The ranks wait and issue at different times, so each would end its bucket elsewhere. They settle it: a rank that has a
reason to send issues a *header*, an all_reduce of the minimum of how many calls it holds. When that is done all ranks
know a number of calls that all of them have issued, and these are the bucket. What a rank decides by itself thus only
makes a bucket smaller, never different. The rest stays for the next one.

A reason is a full bucket ("max_bytes", "max_calls"), or that this rank waits for anything at all: others may need the
calls that it holds in order to come to what it waits for. Blocking calls take part too, since they may meet an
asynchronous call of another rank.

The calls of a group by one backend form a *lane* with a communicator of its own, on which header and data follow each
other in one order on all ranks. Making a call blocks nobody; everything goes on in polls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import Backend, spread
from deepspeed_mcrdl.config import FusionBlock
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.routing.table import Lookup
from deepspeed_mcrdl.safety import Progress
from deepspeed_mcrdl.transforms.lanes import Lane, Lanes
from deepspeed_mcrdl.work import DONE, Pending

MAX_BYTES = 2**20  # of a bucket, where neither config nor table says
_WHAT = "fused"
_ALIGNMENT = 64  # bytes, of each kind's place in a lane's buffer
_HEADER_OP = "min"


class _Kind(NamedTuple):
    """What the calls have in common that one operation can carry: `rest` are the root and the reduce operation."""

    operation: Operation
    dtype: torch.dtype
    rest: tuple[Any, ...]


class _Call(Pending):
    """A call that its lane holds or carries. Its Work is not driven, but its lane is; a wait is for what is under way
    there."""

    def __init__(self, lane: _Lane, operation: Operation, args: tuple[Any, ...]) -> None:
        (self.input,), (self.output,) = operation.tensors(*args)
        gathers = operation is ops.ALL_GATHER_INTO_TENSOR
        self.kind = _Kind(operation, self.input.dtype, () if gathers else args[1:])
        self.bytes = self.output.nbytes
        self._lane = lane
        self._done = False
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """The results are there, or there is an error."""
        if not self._done:
            self._error = error
            self._done = True

    def poll(self) -> bool:
        if not self._done:
            self._lane.advance()
            under_way = self._lane.under_way
            self.host_driven, self.yields_s = under_way.host_driven, under_way.yields_s
        if self._error is not None:
            raise self._error
        return self._done

    def block(self, limit_s: float) -> None:
        self._lane.under_way.block(limit_s)


class _Part:
    """The calls of one kind in a bucket, as one operation.

    Attributes:
        calls: the calls.
        nbytes: room that it needs, a multiple of the alignment.
        pending: the operation under way.
    """

    def __init__(self, kind: _Kind, calls: Sequence[_Call], group: Group) -> None:
        self._kind, self.calls, self._group = kind, calls, group
        self._sizes = [call.input.numel() for call in calls]
        self._sent = sum(self._sizes)
        gathers = kind.operation is ops.ALL_GATHER_INTO_TENSOR
        self._received = self._sent * group.size if gathers else 0
        used = (self._sent + self._received) * kind.dtype.itemsize
        self.nbytes = -(-used // _ALIGNMENT) * _ALIGNMENT
        self._finish: Callable[[], None] = lambda: None
        self.pending: Pending = DONE

    def start(self, backend: Backend, room: torch.Tensor) -> None:
        """Copy the calls' tensors into `room`, bytes, and start the operation."""
        if not self._sent:
            return
        operation, dtype, rest = self._kind
        flat = room[: (self._sent + self._received) * dtype.itemsize].view(dtype)
        sent, received = flat[: self._sent], flat[self._sent :]
        torch.cat([call.input.detach().reshape(-1) for call in self.calls], out=sent)
        method: Callable[..., Pending] = getattr(backend, operation.name)
        if self._received:
            self._finish = lambda: self._spread_blocks(received.view(self._group.size, self._sent))
            self.pending = method(self._group, received, sent)
            return
        if self._writes(operation):
            self._finish = lambda: spread(sent, [call.output for call in self.calls])
        self.pending = method(self._group, sent, *rest)

    def _writes(self, operation: Operation) -> bool:
        """Return whether this rank has results: of a reduction to one rank all others have none."""
        root = operation.root(self.calls[0].input, *self._kind.rest)
        at_root = root == self._group.ranks[self._group.rank]
        return root is None or at_root == operation.reduces

    def _spread_blocks(self, rows: torch.Tensor) -> None:
        with torch.no_grad():
            for call, block in zip(self.calls, torch.split(rows, self._sizes, dim=1), strict=True):
                call.output.copy_(block.reshape(call.output.shape))

    def poll(self) -> bool:
        """Give it a chance to progress; return whether the calls are done, or raise its error."""
        if not self.pending.poll():
            return False
        self._finish()
        for call in self.calls:
            call.end()
        return True


class _Lane(Lane):
    """The fused calls of a group by one backend.

    Args:
        backend: the backend.
        group: a Group of the same ranks that has no other calls by it.
        max_bytes: a bucket of so many bytes is full,
        max_calls: and one of so many calls.
        progress: what drives the lane while it has calls.

    Attributes:
        under_way: the operation that it waits for.
        operations: how many operations have carried calls, headers not counted.
    """

    def __init__(self, backend: Backend, group: Group, max_bytes: int, max_calls: int, progress: Progress) -> None:
        super().__init__()
        self._backend, self._group, self._progress = backend, group, progress
        self._max_bytes, self._max_calls = max_bytes, max_calls
        self._entry = threading.RLock()  # of what `issue` changes; nothing under it blocks
        self._held: deque[_Call] = deque()
        self._issued = self._asked = self._taken = 0
        self._unasked_bytes = 0  # of the calls that there is no reason to send yet
        self._watched = False
        self._count = torch.zeros(1, dtype=torch.int64)
        self._header: Pending | None = None
        self._parts: deque[_Part] = deque()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.under_way: Pending = DONE
        self.operations = 0

    def issue(self, operation: Operation, args: tuple[Any, ...]) -> Pending:
        """Take a call up. The ranks issue those of a lane in one order."""
        call = _Call(self, operation, args)
        self.note()
        with self._entry:
            if self._error is not None:
                raise self._error
            self._held.append(call)
            self._unasked_bytes += call.bytes
            self._issued += 1
            if not self._watched:
                self._watched = True
                self._progress.watch(self)
            unasked = self._issued - self._asked
            full = unasked >= self._max_calls or self._unasked_bytes >= self._max_bytes
        if full:
            self.send()
        return call

    def send(self) -> None:
        """Send off all calls issued so far."""
        if self._held:
            with self._entry:
                self._asked = self._issued
                self._unasked_bytes = 0
            self.advance()

    def _move(self) -> None:
        while self._error is None:
            while self._parts:
                if not self._parts[0].poll():
                    self.under_way = self._parts[0].pending
                    return
                self._parts.popleft()
                self.note()
            if self._header is None:
                if self._asked <= self._taken:
                    break
                self._count[0] = self._fitting()
                self._header = self._backend.all_reduce(self._group, self._count, _HEADER_OP)  # type: ignore[attr-defined]
            if not self._header.poll():
                self.under_way = self._header
                return
            self._header = None
            self.note()
            self._take(int(self._count.item()))
        self.under_way = DONE
        with self._entry:
            if not self._held:
                self._watched = False
                self._progress.forget(self)

    def _fitting(self) -> int:
        """Return how many of the calls held, from the first on, are a bucket; one at least."""
        size = 0
        with self._entry:
            for number, call in enumerate(self._held):
                size += call.bytes
                if number == self._max_calls or (number and size > self._max_bytes):
                    return number
            return len(self._held)

    def _take(self, number: int) -> None:
        by_kind: dict[_Kind, list[_Call]] = {}  # in the order of the first calls, which is the same on all ranks
        with self._entry:
            for _ in range(number):
                call = self._held.popleft()
                by_kind.setdefault(call.kind, []).append(call)
            self._taken += number
            self._parts = deque(_Part(kind, calls, self._group) for kind, calls in by_kind.items())
        whole = sum(part.nbytes for part in self._parts)
        if self._buffer.numel() < whole:
            self._buffer = torch.empty(whole, dtype=torch.uint8)
        rooms = torch.split(self._buffer[:whole], [part.nbytes for part in self._parts])
        for part, room in zip(self._parts, rooms, strict=True):
            part.start(self._backend, room)
        self.operations += sum(room.numel() > 0 for room in rooms)

    @property
    def idle(self) -> bool:
        return not self._watched

    def end(self, error: Exception) -> None:
        with self._entry:
            self._error = self._error or error
            for call in (*(call for part in self._parts for call in part.calls), *self._held):
                call.end(error)
            self._held.clear()
            self._watched = False
            self._progress.forget(self)


class Fusion:
    """The lanes of this process.

    Args:
        limits: which calls are fused, and when a bucket is full.
        table: the tuning table in use, if there is one.
        groups: the groups of the job.
        progress: who waits.
    """

    def __init__(self, limits: FusionBlock, table: Lookup | None, groups: Groups, progress: Progress) -> None:
        self._limits, self._table = limits, table
        self._progress = progress
        self._lanes: Lanes[_Lane] = Lanes(groups, progress)
        progress.hold(self._send)

    def takes(self, operation: Operation, group: Group, args: tuple[Any, ...]) -> bool:
        """Return whether such calls are fused where the backend can; all ranks of the group say the same."""
        if operation.name not in self._limits.operations or group.size == 1:
            return False
        inputs, outputs = operation.tensors(*args)
        on_host = all(tensor.device.type == "cpu" for tensor in (*inputs, *outputs))
        return on_host and operation.size(group, *args) <= self._limits.max_call_bytes

    def able(self, backend: Backend, group: Group) -> bool:
        """Return whether `backend` is to carry fused calls of `group` and can, headers too; all ranks say the same."""
        can = backend.lacks(ops.ALL_REDUCE, torch.int64, "cpu", _HEADER_OP) is None
        can = can and group.size > 1 and backend.misfit(group.mesh) is None
        return can and self._max_bytes(backend, group) is not None

    def _max_bytes(self, backend: Backend, group: Group) -> int | None:
        """Return the size of a bucket; None: fused calls have been measured to be slower."""
        if self._limits.max_bytes is not None:
            return self._limits.max_bytes
        entry = None if self._table is None else self._table.bucket(backend.name, group.mesh)
        return MAX_BYTES if entry is None else entry.max_bytes

    def group_of(self, backend: Backend, group: Group) -> Group:
        """Return the Group whose communicator carries what `backend` fuses of `group`; every member makes it."""
        return self._lanes.group_of(backend, group, _WHAT)

    def method(self, backend: Backend, operation: Operation, group: Group) -> Callable[..., Pending]:
        """Return what carries calls of `operation` on `group` by `backend`, which has joined its `group_of`."""
        issue = self._lane(backend, group).issue
        return lambda group, *args: issue(operation, args)

    def _lane(self, backend: Backend, group: Group) -> _Lane:
        def make(own: Group) -> _Lane:
            max_bytes = self._max_bytes(backend, group)
            assert max_bytes is not None, "able() says so first"
            return _Lane(backend, own, max_bytes, self._limits.max_calls, self._progress)

        return self._lanes.lane(backend, group, _WHAT, make)

    def _send(self) -> None:
        for lane in self._lanes:
            lane.send()

    @property
    def operations(self) -> int:
        """How many operations have carried calls of this rank so far, headers not counted."""
        return sum(lane.operations for lane in self._lanes)

    def leave(self, group: Group) -> list[Group]:
        """End the lanes of a group that is being destroyed, and return the Groups made for it."""
        return self._lanes.leave(group)

    def close(self) -> None:
        """End all lanes."""
        self._lanes.close()
        self._progress.let_go(self._send)
