"""torch.distributed's own backends (gloo, nccl) as backends of ours.

The process group that DeepSpeed or torch has made is used where its backend is the one asked for; else the group's
members make one of their own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from deepspeed_mcrdl.aside import then
from deepspeed_mcrdl.backends.base import (
    ARITHMETIC_OPS,
    BIT_OPS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVABLE,
    Backend,
    Job,
    joined,
    message_tag,
    spread,
)
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import counts
from deepspeed_mcrdl.stores import Patient
from deepspeed_mcrdl.work import Pending, Together, waiters

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


_OWN_TAG = 2**31 - 1  # of the messages that this module makes a collective of
_MAX_TAG = _OWN_TAG - 1
_LOOK_S = 400e-6
_STREAM_NAP_S = 1e-3
_BEFORE_ITS_WAIT = timedelta(minutes=30)  # the most that a call may be under way before somebody waits for it
_LEAST_LIMIT_S = 1e-3  # torch counts whole milliseconds, and none of them is no limit


class C10dPending(Pending):
    """A torch Work that says when it is done.

    Args:
        inner: torch's Work.
        buffers: whatever must stay alive until it is done.
    """

    # Yielding before sleeping is 20 to 35 % faster from 256 B to 1 MB, also with more ranks than cores; looking for
    # longer takes the core from gloo's own threads.
    yields_s = _LOOK_S

    def __init__(self, inner: Any, buffers: Any) -> None:
        self._inner = inner
        self._buffers = buffers

    def poll(self) -> bool:
        if not self._inner.is_completed():
            return False
        self._inner.wait()  # raises its error, if it has one
        return True

    def block(self, limit_s: float) -> None:
        if limit_s < _LEAST_LIMIT_S:
            super().block(limit_s)
            return
        # An error that is not this limit's, poll raises; by what it raises, and when, the two can't be told apart.
        with contextlib.suppress(RuntimeError):
            self._inner.wait(timedelta(seconds=limit_s))


class SilentPending(Pending):
    """A torch Work that says nothing until it is waited for: a thread does so."""

    yields_s = _LOOK_S

    def __init__(self, inner: Any, buffers: Any, source: Callable[[], int]) -> None:
        self._inner = inner
        self._buffers = buffers
        self._source = source
        self._ended = threading.Event()
        self._error: Exception | None = None
        waiters.run(self._wait)

    def _wait(self) -> None:
        try:
            self._inner.wait()
        except Exception as error:
            self._error = error
        self._ended.set()

    def poll(self) -> bool:
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def block(self, limit_s: float) -> None:
        self._ended.wait(limit_s)

    def source_rank(self) -> int:
        return self._source()


class StreamPending(C10dPending):
    """A torch Work whose wait makes the current stream wait, rather than the host."""

    stream_ordered = True

    def order(self) -> None:
        self._inner.wait()

    def block(self, limit_s: float) -> None:
        # torch's wait for NCCL with a limit aborts the communicator when that is over.
        time.sleep(min(limit_s, _STREAM_NAP_S))


class C10dBackend(Backend):
    """A backend of torch.distributed; subclasses name it, make it and say what it can do.

    Class attributes:
        native: dtypes that it takes as they are; others are moved as bytes.
        silent: operations whose torch Works don't say when they are done.
    """

    native: ClassVar[frozenset[torch.dtype]]
    silent: ClassVar[frozenset[str]] = frozenset()
    pending: ClassVar[type[C10dPending]] = C10dPending

    def __init__(self, job: Job) -> None:
        self._store = PrefixStore(self.name, job.store)
        self._timeout = timedelta(seconds=job.progress.timeout_s)
        self._process_groups: dict[Group, Any] = {}
        self._world: Group | None = None

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"

    @abstractmethod
    def make(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a new torch backend of `size` ranks; every one of them calls it."""

    def join(self, group: Group) -> None:
        self._world = self._world or group
        own = self._own(group)
        if own is None:
            store = PrefixStore(str(group.number), self._store)
            own = self.make(store, group.rank, group.size, self._timeout)
        self._process_groups[group] = own

    def _own(self, group: Group) -> Any:
        """Return the torch backend of the group's own process group, if it has one and that is of our kind."""
        if group.torch_group is None:
            return None
        for device in self.devices & {device.type for device in group.torch_group._device_types}:
            backend = group.torch_group._get_backend(torch.device(device))
            if backend.name() == self.name:
                return backend
        return None

    def leave(self, group: Group) -> None:
        process_group = self._process_groups.pop(group, None)
        if process_group is not None and self._own(group) is not process_group:
            process_group.shutdown()

    def close(self) -> None:
        for group in tuple(self._process_groups):
            self.leave(group)

    def _as_taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a one-dimensional view (gloo compares the shapes of blocks, where only sizes matter) of a dtype that
        is taken."""
        flat = tensor.detach().view(-1)
        return flat if flat.dtype in self.native else flat.view(torch.uint8)

    def _as_message(self, tensor: torch.Tensor) -> torch.Tensor:
        # gloo can't receive nothing from any rank, and a sender does not know how it is received.
        return self._as_taken(tensor) if tensor.numel() else torch.zeros(1, dtype=torch.uint8, device=tensor.device)

    def _list_as_taken(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._as_taken(tensor) for tensor in tensors]

    def _as_reduced(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().view(-1)
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else self._as_taken(flat)

    def _pending(self, operation: str, inner: Any, *buffers: Any, source: Callable[[], int] = lambda: -1) -> Pending:
        if operation in self.silent:
            return SilentPending(inner, buffers, source)
        return self.pending(inner, buffers)

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(tensor, op)
        inner = self._process_groups[group].allreduce([self._as_reduced(tensor)], options)
        return self._pending("all_reduce", inner, tensor)

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str) -> Pending:
        options = dist.ReduceOptions()
        options.reduceOp = _reduce_op(tensor, op)
        options.rootRank = group.index(dst)
        inner = self._process_groups[group].reduce([self._as_reduced(tensor)], options)
        return self._pending("reduce", inner, tensor)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = group.index(src)
        inner = self._process_groups[group].broadcast([self._as_taken(tensor)], options)
        return self._pending("broadcast", inner, tensor)

    def all_gather_into_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
        inner = self._process_groups[group]._allgather_base(self._as_taken(output), self._as_taken(input))
        return self._pending("all_gather_into_tensor", inner, output, input)

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor) -> Pending:
        sizes = [t.numel() for t in outputs]
        if len(set(sizes)) == 1:
            inner = self._process_groups[group].allgather([self._list_as_taken(outputs)], [self._as_taken(input)])
            return self._pending("all_gather", inner, outputs, input)
        # torch gathers equal blocks only: all are filled up to the longest, which every rank knows.
        whole = input.new_empty(group.size, max(sizes))
        gathered = self.all_gather_into_tensor(group, whole, _filled_up(input, max(sizes)))
        return then(gathered, lambda: _copy_starts(whole, outputs), whole)

    def gather(self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int) -> Pending:
        options = dist.GatherOptions()
        options.rootRank = group.index(dst)
        at_root = [self._list_as_taken(outputs)] if options.rootRank == group.rank and outputs is not None else []
        inner = self._process_groups[group].gather(at_root, [self._as_taken(input)], options)
        return self._pending("gather", inner, outputs, input)

    def gatherv(self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int) -> Pending:
        # Only the root knows the sizes, so there are messages to it.
        if group.ranks[group.rank] != dst or outputs is None:
            return self._message(group, "send", input, group.index(dst))
        _copy(outputs[group.rank], input)  # first: on a device whoever waits for the messages comes after it too
        return Together(
            [self._message(group, "recv", output, index) for index, output in enumerate(outputs) if index != group.rank]
        )

    def scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Pending:
        options = dist.ScatterOptions()
        options.rootRank = group.index(src)
        at_root = [self._list_as_taken(inputs)] if options.rootRank == group.rank and inputs is not None else []
        inner = self._process_groups[group].scatter([self._as_taken(output)], at_root, options)
        return self._pending("scatter", inner, output, inputs)

    def scatterv(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Pending:
        if group.ranks[group.rank] != src or inputs is None:
            return self._message(group, "recv", output, group.index(src))
        _copy(output, inputs[group.rank])
        return Together(
            [self._message(group, "send", input, index) for index, input in enumerate(inputs) if index != group.rank]
        )

    def reduce_scatter_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _reduce_op(input, op)
        inner = self._process_groups[group]._reduce_scatter_base(
            self._as_reduced(output), self._as_reduced(input), options
        )
        return self._pending("reduce_scatter_tensor", inner, output, input)

    def reduce_scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Pending:
        longest = max(t.numel() for t in inputs)
        whole = torch.cat([_filled_up(t, longest) for t in inputs])
        own = output.new_empty(longest)
        reduced = self.reduce_scatter_tensor(group, own, whole, op)
        return then(reduced, lambda: _copy_starts(own.view(1, -1), [output]), own)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        taken_out, taken_in = self._as_taken(output), self._as_taken(input)
        splits = [
            [] if output_splits is None and input_splits is None else counts(tensor, rows, group.size, taken.numel())
            for tensor, rows, taken in ((output, output_splits, taken_out), (input, input_splits, taken_in))
        ]
        inner = self._process_groups[group].alltoall_base(taken_out, taken_in, *splits)
        return self._pending("all_to_all_single", inner, output, input)

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        # torch's form for lists takes equal blocks only.
        taken = self._list_as_taken(outputs)
        flat_in = joined(self._list_as_taken(inputs))
        flat_out = flat_in.new_empty(sum(t.numel() for t in taken))
        sizes = [t.numel() for t in taken], [self._as_taken(t).numel() for t in inputs]
        inner = self._process_groups[group].alltoall_base(flat_out, flat_in, *sizes)
        pending = self._pending("all_to_all", inner, flat_in, flat_out)
        return then(pending, lambda: spread(flat_out, taken), flat_out)

    def send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int) -> Pending:
        group.index(dst)
        world, process_group = self._messages()
        taken = self._as_message(tensor)
        inner = process_group.send([taken], world.index(dst), message_tag(group, tag, _MAX_TAG))
        return self._pending("send", inner, taken)

    def recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int) -> Pending:
        world, process_group = self._messages()
        tag = message_tag(group, tag, _MAX_TAG)
        taken = self._as_message(tensor)
        if src is None:
            inner = process_group.recv_anysource([taken], tag)
            return self._pending("recv", inner, taken, source=lambda: world.ranks[int(inner._source_rank())])
        group.index(src)
        inner = process_group.recv([taken], world.index(src), tag)
        return self._pending("recv", inner, taken, source=lambda: src)

    def _messages(self) -> tuple[Group, Any]:
        """Return the world, which carries the messages of all groups with a tag space for each: only two members take
        part in a message, so that no communicator could be made for it."""
        assert self._world is not None, "the world is the first group that a backend joins"
        return self._world, self._process_groups[self._world]

    def _message(self, group: Group, operation: str, tensor: torch.Tensor, index: int) -> Pending:
        """Start a message with the group's member `index` on the group's own communicator."""
        taken = self._as_message(tensor)
        inner = getattr(self._process_groups[group], operation)([taken], index, _OWN_TAG)
        return self._pending(operation, inner, taken)

    def barrier(self, group: Group) -> Pending:
        return self._pending("barrier", self._process_groups[group].barrier())


def _reduce_op(tensor: torch.Tensor, op: str) -> Any:
    # The sum of truth values is their "or"; a sum of bytes would be 2.
    return _REDUCE_OPS["max" if op == "sum" and tensor.dtype is torch.bool else op]


def _filled_up(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor.detach().reshape(-1), (0, size - tensor.numel()))


def _copy(output: torch.Tensor, input: torch.Tensor) -> None:
    with torch.no_grad():
        output.copy_(input.view_as(output))


def _copy_starts(rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    for row, output in zip(rows, outputs, strict=True):
        _copy(output, row[: output.numel()])


class GlooBackend(C10dBackend):
    """gloo: CPU tensors over TCP, driven by threads of its own."""

    name = "gloo"
    preference = 30
    devices = frozenset({"cpu"})
    native = FLOATS | (INTEGERS - {torch.int16})
    dtypes = MOVABLE
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS - {torch.int16}, ARITHMETIC_OPS | BIT_OPS),
        **dict.fromkeys(COMPLEX, frozenset({"sum", "avg"})),
        torch.bool: ARITHMETIC_OPS | BIT_OPS,
    }
    silent = frozenset({"send", "recv", "reduce_scatter", "reduce_scatter_tensor"})

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._patient = Patient(job.quick_store)
        self._store = PrefixStore(self.name, self._patient)

    def join(self, group: Group) -> None:
        super().join(group)
        # gloo counts from the call, ours (safety.py) from the wait, and names who is missing: ours is to come first.
        self._process_groups[group]._set_default_timeout(self._timeout + _BEFORE_ITS_WAIT)

    @classmethod
    def unusable(cls) -> str | None:
        return None if dist.is_gloo_available() else "this torch was built without gloo"

    def make(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        made: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        # A rank is connected to the others before these are to it: left at once, it would be lost to them.
        made.barrier().wait()
        return made


class NCCLBackend(C10dBackend):
    """NCCL: CUDA tensors, ordered by streams."""

    name = "nccl"
    preference = 10
    devices = frozenset({"cuda"})
    native = FLOATS | (INTEGERS - {torch.int16})
    dtypes = MOVABLE
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS - {torch.int16}, ARITHMETIC_OPS),
        **dict.fromkeys(COMPLEX, frozenset({"sum", "avg"})),
        torch.bool: ARITHMETIC_OPS,
    }
    pending = StreamPending

    @classmethod
    def unusable(cls) -> str | None:
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        return None if torch.cuda.is_available() else "no CUDA device"

    @classmethod
    def version(cls) -> str:
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def make(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
