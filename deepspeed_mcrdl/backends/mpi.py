"""MPI through mpi4py, without copies: a tensor's memory is handed to MPI by address.

Collectives run on a communicator of the group; messages run on the world's, with a tag space for each group. MPI
moves data only inside its calls, so an unfinished operation is registered with safety.Progress. MPI matches a
blocking collective only with a blocking one: all ranks must pass the same `async_op`, as training code does.

Only mpi4py's upper-case methods are used: the lower-case ones make a hidden communicator while they hold the
interpreter's lock, so that a dead peer would freeze every thread of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_mcrdl.backends.base import ARITHMETIC_OPS, BIT_OPS, FLOATS, INTEGERS, Backend, Job, message_tag
from deepspeed_mcrdl.backends.mpi_halves import HALVES, half_op
from deepspeed_mcrdl.bootstrap import mpi as bootstrap
from deepspeed_mcrdl.checks import row_numel
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.safety import Progress, seconds
from deepspeed_mcrdl.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

_COMPLEX = frozenset({torch.complex64, torch.complex128})
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

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
    torch.bool: "C_BOOL",
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


class MPIWork(Work):
    """A non-blocking MPI operation.

    Args:
        request: the MPI request.
        progress: where the operation is registered until it is done.
        buffers: whatever must stay alive until then.
        finish: called once when it is done.
        status: filled in when a receive is done.
    """

    def __init__(
        self,
        request: MPI.Request,
        progress: Progress,
        buffers: Any,
        finish: Callable[[], Any] | None = None,
        status: MPI.Status | None = None,
    ) -> None:
        self._request = request
        self._progress = progress
        self._buffers = buffers
        self._finish = finish
        self._status = status
        self._done = False
        self._error: BaseException | None = None
        # MPI forbids two threads to complete one request; the one that holds the lock drives it for all.
        self._lock = threading.Lock()
        progress.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = seconds(timeout)
        if limit is not None:
            if not self._progress.wait_until(self.is_completed, limit):
                raise TimeoutError(f"an MPI operation was not done within {limit:g} s")
        elif not self._done:
            with self._lock:
                if not self._done:
                    self._complete(self._request.Wait)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        self.poll()
        return self._done

    def exception(self) -> BaseException | None:
        return self._error

    def source_rank(self) -> int:
        if not self._done or self._status is None:
            return super().source_rank()
        return self._status.Get_source()

    def poll(self) -> None:
        if self._done or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._done:
                self._complete(self._request.Test)
        finally:
            self._lock.release()

    def _complete(self, step: Callable[..., bool]) -> None:
        from mpi4py import MPI

        try:
            if not step(self._status):
                return
            if self._finish is not None:
                self._finish()
        except MPI.Exception as error:
            self._error = error
        self._done = True
        self._buffers = self._finish = None
        self._progress.discard(self)


class MPIBackend(Backend):
    """MPI (MPICH, Intel MPI, Open MPI) on CPU tensors."""

    name = "mpi"
    preference = 20
    devices = frozenset({"cpu"})
    dtypes = frozenset(_MPI_TYPE_NAMES)
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS, ARITHMETIC_OPS | BIT_OPS),
        **dict.fromkeys(_COMPLEX, frozenset({"sum", "product"})),
    }

    @classmethod
    def unusable(cls) -> str | None:
        return bootstrap.usable()

    @classmethod
    def version(cls) -> str:
        return bootstrap.describe()

    def __init__(self, job: Job) -> None:
        self._world = bootstrap.start(job.store, job.rank, job.world_size, job.hosts)
        from mpi4py import MPI

        self._progress = job.progress
        self._in_place = MPI.IN_PLACE
        self._any_source = MPI.ANY_SOURCE
        self._status = MPI.Status
        self._from_address = MPI.memory.fromaddress
        self._types = {dtype: getattr(MPI, name) for dtype, name in _MPI_TYPE_NAMES.items()}
        self._ops: dict[str, MPI.Op] = {op: getattr(MPI, name) for op, name in _MPI_OP_NAMES.items()}
        self._messages = self._world.Dup()
        self._max_tag: int = self._world.Get_attr(MPI.TAG_UB) or _LEAST_MAX_TAG
        self._comms: dict[Group, MPI.Intracomm] = {}

    def join(self, group: Group) -> None:
        if group in self._comms:
            return
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
        # MPI itself ends with the process: once finalised it could not be started again.
        if self._progress.wait_until(lambda: not self._progress, timeout_s=2.0):
            for group in tuple(self._comms):
                self.leave(group)

    def _comm(self, group: Group) -> MPI.Intracomm:
        comm = self._comms.get(group)
        if comm is None:
            self.join(group)
            comm = self._comms[group]
        return comm

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        return [self._from_address(tensor.data_ptr(), tensor.nbytes), self._types[tensor.dtype]]

    def _vector(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[Any]:
        return [self._from_address(tensor.data_ptr(), tensor.nbytes), (counts, None), self._types[tensor.dtype]]

    def _op(self, dtype: torch.dtype, op: str) -> MPI.Op:
        if dtype in HALVES:
            return half_op(dtype, "sum" if op == "avg" else op)
        return self._ops[op]

    def _run(
        self,
        call: tuple[Callable[..., None], Callable[..., MPI.Request]],
        arguments: tuple[Any, ...],
        buffers: Any,
        async_op: bool,
        finish: Callable[[], Any] | None = None,
    ) -> Work | None:
        """Run the (blocking, non-blocking) pair of MPI calls the one way or the other."""
        if async_op:
            return MPIWork(call[1](*arguments), self._progress, buffers, finish)
        call[0](*arguments)
        if finish is not None:
            finish()
        return None

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str, async_op: bool) -> Work | None:
        comm = self._comm(group)
        arguments = (self._in_place, self._buffer(tensor), self._op(tensor.dtype, op))
        finish = partial(_divide, tensor, group.size) if op == "avg" else None
        return self._run((comm.Allreduce, comm.Iallreduce), arguments, tensor, async_op, finish)

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str, async_op: bool) -> Work | None:
        comm = self._comm(group)
        root = group.index(dst)
        own = self._buffer(tensor)
        buffers = (self._in_place, own) if group.rank == root else (own, None)
        arguments = (*buffers, self._op(tensor.dtype, op), root)
        finish = partial(_divide, tensor, group.size) if op == "avg" and group.rank == root else None
        return self._run((comm.Reduce, comm.Ireduce), arguments, tensor, async_op, finish)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int, async_op: bool) -> Work | None:
        comm = self._comm(group)
        return self._run((comm.Bcast, comm.Ibcast), (self._buffer(tensor), group.index(src)), tensor, async_op)

    def all_gather_into_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        if input.data_ptr() == output.data_ptr() + group.rank * input.nbytes:
            own: Any = self._in_place  # DeepSpeed gathers from a view of the output, which MPI takes only like this
        else:
            input = _apart(input, (output,))
            own = self._buffer(input)
        arguments = (own, self._buffer(output))
        return self._run((comm.Allgather, comm.Iallgather), arguments, (output, input), async_op)

    def all_gather(
        self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        flat = input.new_empty(sum(t.numel() for t in outputs))
        arguments = (self._buffer(input), self._vector(flat, [t.numel() for t in outputs]))
        finish = partial(_spread, flat, outputs)
        return self._run((comm.Allgatherv, comm.Iallgatherv), arguments, (flat, input), async_op, finish)

    def gather(
        self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        root = group.index(dst)
        if group.rank != root or outputs is None:
            return self._run((comm.Gather, comm.Igather), (self._buffer(input), None, root), input, async_op)
        flat = input.new_empty(input.numel() * group.size)
        arguments = (self._buffer(input), self._buffer(flat), root)
        finish = partial(_spread, flat, outputs)
        return self._run((comm.Gather, comm.Igather), arguments, (flat, input), async_op, finish)

    def scatter(
        self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        root = group.index(src)
        flat = _joined(inputs) if group.rank == root and inputs is not None else None
        arguments = (None if flat is None else self._buffer(flat), self._buffer(output), root)
        return self._run((comm.Scatter, comm.Iscatter), arguments, (flat, output), async_op)

    def reduce_scatter_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        input = _apart(input, (output,))
        arguments = (self._buffer(input), self._buffer(output), self._op(input.dtype, op))
        finish = partial(_divide, output, group.size) if op == "avg" else None
        call = (comm.Reduce_scatter_block, comm.Ireduce_scatter_block)
        return self._run(call, arguments, (input, output), async_op, finish)

    def reduce_scatter(
        self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        flat = _joined(inputs)
        counts = [t.numel() for t in inputs]
        arguments = (self._buffer(flat), self._buffer(output), counts, self._op(flat.dtype, op))
        finish = partial(_divide, output, group.size) if op == "avg" else None
        return self._run((comm.Reduce_scatter, comm.Ireduce_scatter), arguments, (flat, output), async_op, finish)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        comm = self._comm(group)
        input = _apart(input, (output,))
        if output_splits is None and input_splits is None:
            arguments = (self._buffer(input), self._buffer(output))
            return self._run((comm.Alltoall, comm.Ialltoall), arguments, (output, input), async_op)
        arguments = (
            self._vector(input, _counts(input, input_splits, group.size)),
            self._vector(output, _counts(output, output_splits, group.size)),
        )
        return self._run((comm.Alltoallv, comm.Ialltoallv), arguments, (output, input), async_op)

    def all_to_all(
        self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Work | None:
        comm = self._comm(group)
        flat_in = _joined(inputs)
        flat_out = flat_in.new_empty(sum(t.numel() for t in outputs))
        arguments = (
            self._vector(flat_in, [t.numel() for t in inputs]),
            self._vector(flat_out, [t.numel() for t in outputs]),
        )
        finish = partial(_spread, flat_out, outputs)
        return self._run((comm.Alltoallv, comm.Ialltoallv), arguments, (flat_in, flat_out), async_op, finish)

    def send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work | None:
        group.index(dst)
        arguments = (self._buffer(tensor), dst, message_tag(group, tag, self._max_tag))
        return self._run((self._messages.Send, self._messages.Isend), arguments, tensor, async_op)

    def recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work | None:
        if src is not None:
            group.index(src)
        source = self._any_source if src is None else src
        arguments = (self._buffer(tensor), source, message_tag(group, tag, self._max_tag))
        if async_op:
            return MPIWork(self._messages.Irecv(*arguments), self._progress, tensor, status=self._status())
        self._messages.Recv(*arguments)
        return None

    def barrier(self, group: Group, async_op: bool) -> Work | None:
        comm = self._comm(group)
        return self._run((comm.Barrier, comm.Ibarrier), (), None, async_op)


def _divide(tensor: torch.Tensor, size: int) -> None:
    with torch.no_grad():
        tensor.div_(size)


def _apart(input: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `input`, or a copy of it if it shares memory with an output, which MPI forbids."""
    start, end = input.data_ptr(), input.data_ptr() + input.nbytes
    for output in outputs:
        if start < output.data_ptr() + output.nbytes and output.data_ptr() < end:
            return input.clone()
    return input


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _spread(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for output, part in zip(outputs, torch.split(flat, [t.numel() for t in outputs]), strict=True):
            output.copy_(part.view_as(output))


def _counts(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return elements for each rank from split sizes in rows (None: even)."""
    width = row_numel(tensor)
    if splits is None:
        return [tensor.numel() // size] * size
    return [rows * width for rows in splits]
