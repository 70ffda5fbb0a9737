"""MPI through mpi4py, without copies: a tensor's memory is handed to MPI by address.

Collectives run on a communicator of the group; messages run on the world's, with a tag space for each group. Only
non-blocking calls are made, and polled: a wait can then drive other operations, end in time and be interrupted, and a
rank's blocking call matches another's asynchronous one. Measured, that is as fast as MPI's blocking calls from 256 B
to 16 MB, also with more ranks than cores.

Only mpi4py's upper-case methods are used: the lower-case ones make a hidden communicator while they hold the
interpreter's lock, so that a dead peer would freeze every thread of this process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_mcrdl.backends.base import (
    ARITHMETIC_OPS,
    BIT_OPS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    Backend,
    Job,
    apart,
    divide,
    joined,
    message_tag,
    spread,
)
from deepspeed_mcrdl.backends.mpi_halves import HALVES, half_op
from deepspeed_mcrdl.bootstrap import mpi as bootstrap
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import counts
from deepspeed_mcrdl.work import Pending

if TYPE_CHECKING:
    from mpi4py import MPI

_OTHERS_AT_CLOSE_S = 2.0
_EXCHANGE_TAG = 0
_LEAST_MAX_TAG = 32767  # what the MPI standard promises

_MPI_TYPE_NAMES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    # MPI has no portable 16-bit floats: they travel as integers of that size and are reduced by operators of ours.
    torch.float16: "UINT16_T",
    torch.bfloat16: "UINT16_T",
    torch.float8_e4m3fn: "UINT8_T",
    torch.float8_e5m2: "UINT8_T",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_MPI_OP_NAMES = {
    "sum": "SUM",
    "avg": "SUM",  # divided by the group's size afterwards
    "min": "MIN",
    "max": "MAX",
    "product": "PROD",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


class MPIPending(Pending):
    """A non-blocking MPI operation.

    Args:
        request: the MPI request.
        buffers: whatever must stay alive until it is done.
        finish: called once when it is done.
        status: filled in when a receive is done.
    """

    __slots__ = ("_buffers", "_finish", "_status", "_test")
    host_driven = True

    def __init__(
        self,
        request: MPI.Request,
        buffers: Any,
        finish: Callable[[], Any] | None = None,
        status: MPI.Status | None = None,
    ) -> None:
        self._test = request.Test
        self._buffers = buffers
        self._finish = finish
        self._status = status

    def poll(self) -> bool:
        if not self._test(self._status):
            return False
        if self._finish is not None:
            self._finish()
        self._buffers = self._finish = None
        return True

    def source_rank(self) -> int:
        return super().source_rank() if self._status is None else self._status.Get_source()


class MPIPendingAll(Pending):
    """Several non-blocking MPI operations as one.

    Args:
        test_all: MPI's Testall.
        requests: the MPI requests.
        buffers: whatever must stay alive until they are done.
    """

    __slots__ = ("_buffers", "_requests", "_test_all")
    host_driven = True

    def __init__(
        self, test_all: Callable[[list[MPI.Request]], bool], requests: list[MPI.Request], buffers: Any
    ) -> None:
        self._test_all = test_all
        self._requests = requests
        self._buffers = buffers

    def poll(self) -> bool:
        if not self._test_all(self._requests):
            return False
        self._buffers = None
        return True


class _Matches:
    """Receives that find their messages by matched probes, in the order in which they were issued for each tag.

    MPICH 5.0.2 loses receives from any source between hosts (over UCX; matched probes find every message).
    While a receive from any waits, later ones with its tag wait behind it, as messages are matched in order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._waiting: dict[int, deque[_MatchedPending]] = {}
        self._lock = threading.Lock()

    def wait_for(self, tag: int) -> bool:
        """Return whether a receive with `tag` waits for its message."""
        return bool(self._waiting.get(tag))

    def add(self, receive: _MatchedPending, tag: int) -> None:
        """Take a receive up, behind the others with its tag."""
        with self._lock:
            self._waiting.setdefault(tag, deque()).append(receive)

    def advance(self, tag: int) -> None:
        """Start the receives with `tag` whose messages are here."""
        with self._lock:
            receives = self._waiting.get(tag)
            while receives:
                message = self._comm.Improbe(receives[0].source, tag)
                if message is None:
                    return
                receives.popleft().start(message)
            self._waiting.pop(tag, None)


class _MatchedPending(Pending):
    """A receive that starts when its message is here.

    Args:
        matches: what finds the message.
        source: its rank, or MPI's any source.
        tag: its tag.
        buffer: where it goes, as mpi4py takes it.
        tensor: what keeps that alive.
    """

    host_driven = True

    def __init__(self, matches: _Matches, source: int, tag: int, buffer: Any, tensor: torch.Tensor) -> None:
        self.source = source
        self._matches, self._tag = matches, tag
        self._buffer, self._tensor = buffer, tensor
        self._received: MPIPending | None = None
        matches.add(self, tag)

    def start(self, message: MPI.Message) -> None:
        """Receive `message`."""
        from mpi4py import MPI

        self._received = MPIPending(message.Irecv(self._buffer), self._tensor, status=MPI.Status())

    def poll(self) -> bool:
        if self._received is None:
            self._matches.advance(self._tag)
        return self._received is not None and self._received.poll()

    def source_rank(self) -> int:
        return super().source_rank() if self._received is None else self._received.source_rank()


class MPIBackend(Backend):
    """MPI (MPICH, Intel MPI, Open MPI) on CPU tensors."""

    name = "mpi"
    preference = 20
    devices = frozenset({"cpu"})
    dtypes = frozenset(_MPI_TYPE_NAMES)
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS, ARITHMETIC_OPS | BIT_OPS),
        **dict.fromkeys(COMPLEX, frozenset({"sum", "avg", "product"})),
        torch.bool: ARITHMETIC_OPS | BIT_OPS,
    }

    @classmethod
    def unusable(cls) -> str | None:
        return bootstrap.usable()

    @classmethod
    def version(cls) -> str:
        return bootstrap.describe()

    def details(self) -> str:
        source = bootstrap.started_by()
        return source and f"started by {source}"

    def __init__(self, job: Job) -> None:
        self._world = bootstrap.start(job.quick_store, job.rank, job.world_size, job.hosts)
        from mpi4py import MPI

        self._progress = job.progress
        self._in_place = MPI.IN_PLACE
        self._any_source = MPI.ANY_SOURCE
        self._status = MPI.Status
        self._test_all = MPI.Request.Testall
        self._from_address = MPI.memory.fromaddress
        self._types = {dtype: getattr(MPI, name) for dtype, name in _MPI_TYPE_NAMES.items()}
        self._ops: dict[str, MPI.Op] = {op: getattr(MPI, name) for op, name in _MPI_OP_NAMES.items()}
        self._messages = self._world.Dup()
        self._max_tag: int = self._world.Get_attr(MPI.TAG_UB) or _LEAST_MAX_TAG
        self._comms: dict[Group, MPI.Intracomm] = {}
        self._matches = _Matches(self._messages) if len(set(job.hosts)) > 1 else None
        # Looking for a message moves everything that this rank has to move, also of operations that are done here.
        self._turn = self._messages.Iprobe
        self._progress.add_engine(self._turn)

    def join(self, group: Group) -> None:
        world_group = self._world.Get_group()
        members = world_group.Incl(list(group.ranks))
        # By the members alone; the tag keeps groups that are made at the same time by different threads apart.
        self._comms[group] = self._world.Create_group(members, tag=group.number % self._max_tag)
        members.Free()
        world_group.Free()

    def leave(self, group: Group) -> None:
        comm = self._comms.pop(group, None)
        if comm is not None:
            comm.Free()

    def close(self) -> None:
        # MPI itself ends with the process: once finalised it could not be started again. Others may need this rank to
        # pass data on, so it stays until all are here; but they may be gone, and then nothing is freed.
        together = MPIPending(self._world.Ibarrier(), None)
        done = self._progress.wait_until(lambda: not self._progress and together.poll(), timeout_s=_OTHERS_AT_CLOSE_S)
        self._progress.remove_engine(self._turn)
        if done:
            for group in tuple(self._comms):
                self.leave(group)
        else:
            bootstrap.give_up_peers()

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        return [self._from_address(tensor.data_ptr(), tensor.nbytes), self._types[tensor.dtype]]

    def _vector(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[Any]:
        return [self._from_address(tensor.data_ptr(), tensor.nbytes), (counts, None), self._types[tensor.dtype]]

    def _op(self, dtype: torch.dtype, op: str) -> MPI.Op:
        if dtype in HALVES:
            return half_op(dtype, "sum" if op == "avg" else op)
        # The sum of truth values is their "or"; a sum of bytes would be 2.
        return self._ops["max" if op == "sum" and dtype is torch.bool else op]

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        comm = self._comms[group]
        arguments = (self._in_place, self._buffer(tensor), self._op(tensor.dtype, op))
        finish = partial(divide, tensor, group.size) if op == "avg" else None
        return MPIPending(comm.Iallreduce(*arguments), tensor, finish)

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str) -> Pending:
        comm = self._comms[group]
        root = group.index(dst)
        own = self._buffer(tensor)
        buffers = (self._in_place, own) if group.rank == root else (own, None)
        arguments = (*buffers, self._op(tensor.dtype, op), root)
        finish = partial(divide, tensor, group.size) if op == "avg" and group.rank == root else None
        return MPIPending(comm.Ireduce(*arguments), tensor, finish)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int) -> Pending:
        comm = self._comms[group]
        return MPIPending(comm.Ibcast(self._buffer(tensor), group.index(src)), tensor)

    def all_gather_into_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
        comm = self._comms[group]
        if input.data_ptr() == output.data_ptr() + group.rank * input.nbytes:
            own: Any = self._in_place  # DeepSpeed gathers from a view of the output, which MPI takes only like this
        else:
            input = apart(input, (output,))
            own = self._buffer(input)
        arguments = (own, self._buffer(output))
        return MPIPending(comm.Iallgather(*arguments), (output, input))

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor) -> Pending:
        comm = self._comms[group]
        flat = input.new_empty(sum(t.numel() for t in outputs))
        arguments = (self._buffer(input), self._vector(flat, [t.numel() for t in outputs]))
        finish = partial(spread, flat, outputs)
        return MPIPending(comm.Iallgatherv(*arguments), (flat, input), finish)

    def gather(self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int) -> Pending:
        root = group.index(dst)
        if group.rank != root or outputs is None:
            return self._exchange(group, {root: input}, {})
        return self._exchange(group, {root: input}, dict(enumerate(outputs)))

    gatherv = gather

    def scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Pending:
        root = group.index(src)
        if group.rank != root or inputs is None:
            return self._exchange(group, {}, {root: output})
        return self._exchange(group, dict(enumerate(inputs)), {root: output})

    scatterv = scatter

    def _exchange(
        self, group: Group, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Pending:
        """Send tensors to places in the group and receive from places, without copies.

        Where every rank has a tensor for each other, that is what MPI's own vector collectives do. All collectives of a
        group are issued in one order by its ranks, so one tag on its communicator keeps these messages apart.
        """
        comm, own = self._comms[group], group.rank
        if own in sent and own in received:
            _copy(sent[own], received[own])
        requests = [comm.Irecv(self._buffer(t), place, _EXCHANGE_TAG) for place, t in received.items() if place != own]
        requests += [comm.Isend(self._buffer(t), place, _EXCHANGE_TAG) for place, t in sent.items() if place != own]
        return MPIPendingAll(self._test_all, requests, (sent, received))

    def reduce_scatter_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
        comm = self._comms[group]
        input = apart(input, (output,))
        arguments = (self._buffer(input), self._buffer(output), self._op(input.dtype, op))
        finish = partial(divide, output, group.size) if op == "avg" else None
        return MPIPending(comm.Ireduce_scatter_block(*arguments), (input, output), finish)

    def reduce_scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Pending:
        comm = self._comms[group]
        flat = joined(inputs)
        arguments = (self._buffer(flat), self._buffer(output), [t.numel() for t in inputs], self._op(flat.dtype, op))
        finish = partial(divide, output, group.size) if op == "avg" else None
        return MPIPending(comm.Ireduce_scatter(*arguments), (flat, output), finish)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        comm = self._comms[group]
        input = apart(input, (output,))
        if output_splits is None and input_splits is None:
            arguments = (self._buffer(input), self._buffer(output))
            return MPIPending(comm.Ialltoall(*arguments), (output, input))
        arguments = (
            self._vector(input, counts(input, input_splits, group.size)),
            self._vector(output, counts(output, output_splits, group.size)),
        )
        return MPIPending(comm.Ialltoallv(*arguments), (output, input))

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        inputs = [apart(input, outputs) for input in inputs]
        return self._exchange(group, dict(enumerate(inputs)), dict(enumerate(outputs)))

    def send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int) -> Pending:
        group.index(dst)
        arguments = (self._buffer(tensor), dst, message_tag(group, tag, self._max_tag))
        return MPIPending(self._messages.Isend(*arguments), tensor)

    def recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int) -> Pending:
        if src is not None:
            group.index(src)
        source = self._any_source if src is None else src
        buffer, tag = self._buffer(tensor), message_tag(group, tag, self._max_tag)
        if self._matches is not None and (src is None or self._matches.wait_for(tag)):
            return _MatchedPending(self._matches, source, tag, buffer, tensor)
        return MPIPending(self._messages.Irecv(buffer, source, tag), tensor, status=self._status())

    def barrier(self, group: Group) -> Pending:
        return MPIPending(self._comms[group].Ibarrier(), None)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source.view_as(target))
