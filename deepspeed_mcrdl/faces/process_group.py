"""torch.distributed's face: a process group of the c10d backend "mcrdl".

`init_process_group("mcrdl")`, new_group, DDP, FSDP2, functional collectives and DeviceMesh call it with torch's own
signatures; each method is one entry of the catalogue. torch gives ranks as places in the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_mcrdl import composed
from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import NAME, parse
from deepspeed_mcrdl.errors import CallError, install_excepthook
from deepspeed_mcrdl.faces.reduce_ops import op_name
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.runtime import Runtime, current
from deepspeed_mcrdl.stores import Patient
from deepspeed_mcrdl.work import AllOf, Work, future_of

Tensors = Sequence[torch.Tensor]


def create(options: Any, backend_options: Any) -> MCRDLProcessGroup:
    """Return a new process group; every member calls this, the world's before all others.

    Args:
        options: torch's DistributedBackendOptions.
        backend_options: what the script passed as `pg_options`: the "mcrdl" block as a dict, or None.
    """
    install_excepthook()
    return MCRDLProcessGroup(options, backend_options)


class MCRDLWork(dist.Work):
    """A Work as torch's C++ knows it.

    Args:
        work: the operation under way.
        results: the tensors that its future holds.
        place: global rank -> place in the group, for the source of a message.
        timeout: limit of a wait that gives none.
    """

    def __init__(
        self, work: Work | AllOf, results: Tensors, place: Callable[[int], int], timeout: timedelta | None
    ) -> None:
        super().__init__()
        self._work = work
        self._results = list(results)
        self._place = place
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is done, or raise its error."""
        return self._work.wait(timeout if timeout and timeout > timedelta() else self._timeout)

    def is_completed(self) -> bool:
        """Return whether the operation is done, successfully or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation is done without an error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return the error that the operation ended with, if it has."""
        return self._work.exception()

    def synchronize(self) -> None:
        """Wait; on a GPU only the current stream does."""
        self.wait()

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the results."""
        return self._results

    def get_future(self) -> Any:
        """Return a future with the tensors."""
        return future_of(self._work, self._results)

    def source_rank(self) -> int:
        """Return the place in the group that a completed receive got its message from."""
        assert isinstance(self._work, Work)
        return self._place(self._work.source_rank())

    _source_rank = source_rank


# torch declares its methods with all the forms that its C++ binding takes; a subclass is called with one of them only.
_TorchProcessGroup: Any = dist.ProcessGroup


class MCRDLProcessGroup(_TorchProcessGroup):  # type: ignore[misc]
    """A process group whose calls go through the runtime of this process."""

    def __init__(self, options: Any, backend_options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._options = options
        self._timeout: timedelta = options.timeout
        self._batch = threading.local()
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        runtime = current()
        if runtime is None:
            config = parse(backend_options or {})
            if len(ranks) < options.group_size or ranks[options.group_rank] != options.group_rank:
                raise CallError('the backend "mcrdl" must carry the default group before it can carry others')
            self._register_devices(options.store)
            runtime = Runtime(config, options.store, options.group_rank, options.group_size, self, self._timeout)
        else:
            runtime.make_group(ranks, lambda: self._register_devices(Patient(options.store)))
            runtime.add_group(self, ranks, options.group_id)
        if runtime.config.timeout_s is not None:
            self._timeout = runtime.limit
        self._runtime = runtime

    def _register_devices(self, store: Any) -> None:
        # Whoever asks torch for the group's devices, or calls a backend past us, finds a real one; ours use it too.
        place, size = self._options.group_rank, self._options.group_size
        self._store = store
        gloo = dist.ProcessGroupGloo(store, place, size, self._timeout)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = self._timeout
            nccl = dist.ProcessGroupNCCL(self._options.store, place, size, nccl_options)
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return str(self._options.group_id)

    def setGroupName(self, name: str) -> None:
        """Take torch's name of the group, which came with its options already."""

    @property
    def group_name(self) -> Any:
        """torch's name of the group."""
        return self._options.group_id

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def _start(self, operation: Operation, results: Tensors, *args: Any) -> MCRDLWork:
        return self._work(self._runtime.issue(operation, self, args, async_op=True), results)

    def _work(self, work: Work | AllOf | None, results: Tensors) -> MCRDLWork:
        assert work is not None
        batch = getattr(self._batch, "works", None)
        if batch is not None:
            batch.append(work)
        return MCRDLWork(work, results, self._runtime.groups.of(self).index, self._timeout)

    def _global(self, place: int) -> int:
        return self._runtime.groups.of(self).ranks[place]

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MCRDLWork:
        tensor = _one(tensors)
        if tensor.is_sparse:
            composed.all_reduce_sparse(self._runtime, self, tensor, _op_of(opts))
            return self._work(AllOf([]), [tensor])
        return self._start(ops.ALL_REDUCE, [tensor], tensor, _op_of(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> MCRDLWork:
        return self._work(composed.all_reduce_coalesced(self._runtime, self, tensors, _op_of(opts), True), tensors)

    def reduce(self, tensors: Any, opts: Any) -> MCRDLWork:
        tensor = _one(tensors)
        return self._start(ops.REDUCE, [tensor], tensor, self._global(opts.rootRank), _op_of(opts))

    def broadcast(self, tensors: Any, opts: Any, timeout: Any = None) -> MCRDLWork:
        tensor, root = _one(tensors), opts if isinstance(opts, int) else opts.rootRank
        return self._start(ops.BROADCAST, [tensor], tensor, self._global(root))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MCRDLWork:
        outputs = _one_list(output_tensors)
        return self._start(ops.ALL_GATHER, outputs, outputs, _one(input_tensors))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MCRDLWork:
        return self._start(ops.ALL_GATHER_INTO_TENSOR, [output], output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MCRDLWork:
        work = composed.all_gather_coalesced(self._runtime, self, outputs, inputs, True)
        return self._work(work, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MCRDLWork:
        work = composed.all_gather_lists(self._runtime, self, output_lists, inputs, True)
        return self._work(work, [tensor for row in output_lists for tensor in row])

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> MCRDLWork:
        outputs = _one_list(output_tensors) if output_tensors else None
        return self._start(ops.GATHER, outputs or [], outputs, _one(input_tensors), self._global(opts.rootRank))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> MCRDLWork:
        inputs, output = _one_list(input_tensors) if input_tensors else None, _one(output_tensors)
        return self._start(ops.SCATTER, [output], output, inputs, self._global(opts.rootRank))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> MCRDLWork:
        output = _one(output_tensors)
        return self._start(ops.REDUCE_SCATTER, [output], output, _one_list(input_tensors), _op_of(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MCRDLWork:
        return self._start(ops.REDUCE_SCATTER_TENSOR, [output], output, input, _op_of(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MCRDLWork:
        work = composed.reduce_scatter_coalesced(self._runtime, self, outputs, inputs, _op_of(opts), True)
        return self._work(work, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> MCRDLWork:
        # torch takes an empty list of splits for none.
        splits = (list(output_split_sizes) or None, list(input_split_sizes) or None)
        return self._start(ops.ALL_TO_ALL_SINGLE, [output], output, input, *splits)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> MCRDLWork:
        return self._start(ops.ALL_TO_ALL, output_tensors, list(output_tensors), list(input_tensors))

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MCRDLWork:
        return self._start(ops.SEND, [], _one(tensors), self._global(dst), tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MCRDLWork:
        tensor = _one(tensors)
        return self._start(ops.RECV, [tensor], tensor, self._global(src), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MCRDLWork:
        tensor = _one(tensors)
        return self._start(ops.RECV, [tensor], tensor, None, tag)

    def barrier(self, opts: Any = None) -> MCRDLWork:
        return self._start(ops.BARRIER, [])

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch.works = []

    def _end_coalescing(self, device: Any = None) -> MCRDLWork:
        works, self._batch.works = self._batch.works, None
        return self._work(AllOf(works), [])

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the waits of later calls."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Free what the backends keep for the group; with the default group everything ends."""
        self._runtime.forget(self)

    abort = shutdown


def _one(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise CallError(f"a call takes one tensor for each process, got {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def _one_list(lists: Any) -> list[torch.Tensor]:
    if lists and isinstance(lists[0], torch.Tensor):
        return list(lists)
    if len(lists) != 1:
        raise CallError(f"a call takes one list of tensors for each process, got {len(lists)}")
    return list(lists[0])


def _op_of(opts: Any) -> str:
    return "sum" if opts is None else op_name(getattr(opts, "reduceOp", opts))
