"""torch.distributed's own backends (gloo, nccl) as backends of ours.

The process group that DeepSpeed or torch has made is used where its backend is the one asked for; else the group's
members make one of their own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from deepspeed_mcrdl.backends.base import ARITHMETIC_OPS, BIT_OPS, FLOATS, INTEGERS, Backend, Job, message_tag
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.safety import Progress, seconds
from deepspeed_mcrdl.work import Work

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


_MAX_TAG = 2**31 - 1
_LOOK_S = 400e-6


class C10dWork(Work):
    """A torch Work whose wait keeps host-driven operations of other backends going.

    Args:
        inner: torch's Work.
        progress: the host-driven operations.
        buffers: whatever must stay alive until the end.
        group: whose ranks a source rank is translated by.
        blocks_host: whether wait() blocks the host, rather than the current stream.
        tells: whether torch's Work says when it is done; if not, a thread that waits for it does.
    """

    def __init__(
        self, inner: Any, progress: Progress, buffers: Any, group: Group, blocks_host: bool, tells: bool
    ) -> None:
        self._inner = inner
        self._progress = progress
        self._buffers = buffers
        self._group = group
        self._blocks_host = blocks_host
        self._tells = tells
        self._waiter: threading.Thread | None = None
        self._waited = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = seconds(timeout)
        if not self._blocks_host:
            self._inner.wait()
            return True
        polled = self._progress or limit is not None or self._waiter is not None
        if polled and not self._progress.wait_until(self.is_completed, limit):
            raise TimeoutError(f"an operation on {self._group} was not done within {limit:g} s")
        if not self._waited:
            self._wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if self._waited:
            return True
        if self._tells:
            return bool(self._inner.is_completed())
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="mcrdl-c10d-wait", daemon=True)
            self._waiter.start()
        return self._waited

    def exception(self) -> BaseException | None:
        if not self._waited and self.is_completed():
            self._wait()
        return self._error

    def source_rank(self) -> int:
        return self._group.ranks[int(self._inner._source_rank())]

    def _wait(self) -> None:
        try:
            self._inner.wait()
        except (RuntimeError, ValueError) as error:
            self._error = error
        self._waited = True
        self._buffers = None


class C10dBackend(Backend):
    """A backend of torch.distributed; subclasses name it and say what it can do."""

    blocks_host: ClassVar[bool]
    silent: ClassVar[frozenset[str]] = frozenset()  # operations whose torch Works don't say when they are done

    def __init__(self, job: Job) -> None:
        self._progress = job.progress
        self._process_groups: dict[Group, Any] = {}
        self._world: Group | None = None

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"

    def join(self, group: Group) -> None:
        if group in self._process_groups:
            return
        if self._world is None:
            self._world = group
        own = self._own_backend(group.torch_group)
        self._process_groups[group] = own or dist.new_group(
            list(group.ranks), backend=self.name, use_local_synchronization=True
        )

    def _own_backend(self, torch_group: Any) -> Any:
        """Return `torch_group` if it carries tensors of our devices with this very backend."""
        served = {device.type for device in torch_group._device_types}
        for device in self.devices & served:
            if torch_group._get_backend(torch.device(device)).name() == self.name:
                return torch_group
        return None

    def leave(self, group: Group) -> None:
        process_group = self._process_groups.pop(group, None)
        if process_group is not None and process_group is not group.torch_group:
            dist.destroy_process_group(process_group)

    def close(self) -> None:
        for group in tuple(self._process_groups):
            self.leave(group)

    def _process_group(self, group: Group) -> Any:
        process_group = self._process_groups.get(group)
        if process_group is None:
            self.join(group)
            process_group = self._process_groups[group]
        return process_group

    def _finish(self, operation: str, group: Group, inner: Any, buffers: Any, async_op: bool) -> Work | None:
        if not async_op and not (self.blocks_host and self._progress):
            if self.blocks_host and operation not in self.silent:
                _look_before_sleeping(inner.is_completed)
            inner.wait()
            return None
        work = C10dWork(inner, self._progress, buffers, group, self.blocks_host, operation not in self.silent)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str, async_op: bool) -> Work | None:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        inner = self._process_group(group).allreduce([tensor], options)
        return self._finish("all_reduce", group, inner, tensor, async_op)

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str, async_op: bool) -> Work | None:
        options = dist.ReduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        options.rootRank = group.index(dst)
        inner = self._process_group(group).reduce([tensor], options)
        return self._finish("reduce", group, inner, tensor, async_op)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int, async_op: bool) -> Work | None:
        options = dist.BroadcastOptions()
        options.rootRank = group.index(src)
        inner = self._process_group(group).broadcast([tensor], options)
        return self._finish("broadcast", group, inner, tensor, async_op)

    def all_gather_into_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor, async_op: bool
    ) -> Work | None:
        inner = self._process_group(group)._allgather_base(_flat(output), _flat(input))
        return self._finish("all_gather_into_tensor", group, inner, (output, input), async_op)

    def all_gather(
        self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool
    ) -> Work | None:
        inner = self._process_group(group).allgather([_flat_list(outputs)], [_flat(input)])
        return self._finish("all_gather", group, inner, (outputs, input), async_op)

    def gather(
        self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int, async_op: bool
    ) -> Work | None:
        options = dist.GatherOptions()
        options.rootRank = group.index(dst)
        at_root = [_flat_list(outputs)] if options.rootRank == group.rank and outputs is not None else []
        inner = self._process_group(group).gather(at_root, [_flat(input)], options)
        return self._finish("gather", group, inner, (outputs, input), async_op)

    def scatter(
        self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, async_op: bool
    ) -> Work | None:
        options = dist.ScatterOptions()
        options.rootRank = group.index(src)
        at_root = [_flat_list(inputs)] if options.rootRank == group.rank and inputs is not None else []
        inner = self._process_group(group).scatter([_flat(output)], at_root, options)
        return self._finish("scatter", group, inner, (output, inputs), async_op)

    def reduce_scatter_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str, async_op: bool
    ) -> Work | None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[op]
        inner = self._process_group(group)._reduce_scatter_base(_flat(output), _flat(input), options)
        return self._finish("reduce_scatter_tensor", group, inner, (output, input), async_op)

    def reduce_scatter(
        self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, async_op: bool
    ) -> Work | None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[op]
        inner = self._process_group(group).reduce_scatter([_flat(output)], [_flat_list(inputs)], options)
        return self._finish("reduce_scatter", group, inner, (output, inputs), async_op)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        process_group = self._process_group(group)
        if output_splits is None and input_splits is None:
            inner = process_group.alltoall_base(_flat(output), _flat(input), [], [])
        else:
            inner = process_group.alltoall_base(output, input, list(output_splits or ()), list(input_splits or ()))
        return self._finish("all_to_all_single", group, inner, (output, input), async_op)

    def all_to_all(
        self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Work | None:
        inner = self._process_group(group).alltoall(_flat_list(outputs), _flat_list(inputs))
        return self._finish("all_to_all", group, inner, (outputs, inputs), async_op)

    def send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work | None:
        process_group, carrier, tag = self._channel(group, tag)
        inner = process_group.send([tensor], carrier.index(dst), tag)
        return self._finish("send", carrier, inner, tensor, async_op)

    def recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work | None:
        process_group, carrier, tag = self._channel(group, tag)
        if src is None:
            inner = process_group.recv_anysource([tensor], tag)
        else:
            inner = process_group.recv([tensor], carrier.index(src), tag)
        return self._finish("recv", carrier, inner, tensor, async_op)

    def _channel(self, group: Group, tag: int) -> tuple[Any, Group, int]:
        """Return where messages of `group` go: a process group, the Group it stands for, and the tag there.

        Only two members take part in a message, so a communicator can't be made for it: a torch group that has our
        backend carries its own messages, the world carries the others' with a tag space for each group.
        """
        if self._own_backend(group.torch_group) is not None:
            return group.torch_group, group, tag
        assert self._world is not None, "the world is the first group that a backend joins"
        return self._process_groups[self._world], self._world, message_tag(group, tag, _MAX_TAG)

    def barrier(self, group: Group, async_op: bool) -> Work | None:
        return self._finish("barrier", group, self._process_group(group).barrier(), None, async_op)


def _look_before_sleeping(done: Callable[[], bool]) -> None:
    """Give the core away for a short while until `done`: most calls end before a sleeping thread would be awake.

    Measured 20 to 35 % faster from 256 B to 1 MB, also with more ranks than cores; looking for longer takes the core
    from gloo's own threads.
    """
    end = time.perf_counter() + _LOOK_S
    while not done() and time.perf_counter() < end:
        os.sched_yield()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view: gloo compares the shapes of the blocks, where only their sizes matter."""
    return tensor.detach().view(-1)


def _flat_list(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_flat(tensor) for tensor in tensors]


class GlooBackend(C10dBackend):
    """gloo: CPU tensors over TCP, driven by threads of its own."""

    name = "gloo"
    preference = 30
    devices = frozenset({"cpu"})
    dtypes = FLOATS | (INTEGERS - {torch.int16})
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS - {torch.int16}, ARITHMETIC_OPS | BIT_OPS),
    }
    blocks_host = True
    silent = frozenset({"send", "recv", "reduce_scatter", "reduce_scatter_tensor"})

    @classmethod
    def unusable(cls) -> str | None:
        return None if dist.is_gloo_available() else "this torch was built without gloo"


class NCCLBackend(C10dBackend):
    """NCCL: CUDA tensors, ordered by streams."""

    name = "nccl"
    preference = 10
    devices = frozenset({"cuda"})
    dtypes = FLOATS | (INTEGERS - {torch.int16}) | {torch.bool, torch.complex64, torch.complex128}
    reductions = dict.fromkeys(FLOATS | (INTEGERS - {torch.int16}), ARITHMETIC_OPS | {"avg"})
    blocks_host = False

    @classmethod
    def unusable(cls) -> str | None:
        if not dist.is_nccl_available():
            return "this torch was built without NCCL"
        return None if torch.cuda.is_available() else "no CUDA device"

    @classmethod
    def version(cls) -> str:
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
