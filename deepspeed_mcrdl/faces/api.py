"""The paper's own interface: `import deepspeed_mcrdl as mcrdl`, and a backend named in each call.

    mcrdl.init(backends=["mpi", "gloo"])
    work = mcrdl.all_reduce(tensor, backend="mpi", async_op=True)
    mcrdl.all_to_all_single(output, input)        # "auto": as the config or the router chooses
    mcrdl.synchronize()

Signatures are torch.distributed's; `op` may also be a name such as "sum". `group` is a torch process group, None the
world; ranks are global. A backend that is named and can't do the call is an error. It shares the runtime of the process
with DeepSpeed and torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from deepspeed_mcrdl import composed
from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bootstrap.launcher import started_by_mpi
from deepspeed_mcrdl.config import AUTO, NAME, parse
from deepspeed_mcrdl.errors import CallError, install_excepthook
from deepspeed_mcrdl.faces.reduce_ops import op_name
from deepspeed_mcrdl.observe import stragglers
from deepspeed_mcrdl.observe.session import Session
from deepspeed_mcrdl.observe.summary import show
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.runtime import Runtime, current, for_torch
from deepspeed_mcrdl.work import AllOf, Work

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gatherv",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "all_to_allv",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_group",
    "end_step",
    "finalize",
    "gather",
    "gather_object",
    "gatherv",
    "get_backends",
    "get_rank",
    "get_world_size",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "log_reset",
    "log_step",
    "log_stragglers",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "scatterv",
    "send",
    "synchronize",
]

Tensors = Sequence[torch.Tensor]

_W = TypeVar("_W", bound=Work | AllOf | None)

_TIMEOUT = timedelta(minutes=30)
_MOST_OUTSTANDING = 64

_outstanding: list[Work | AllOf] = []
_started_torch = False


def init(
    backends: str | Sequence[str] = AUTO, config: Mapping[str, Any] | None = None, timeout: timedelta = _TIMEOUT
) -> None:
    """Start communication; every rank calls this.

    It starts torch.distributed if nobody has, from the environment of torchrun, deepspeed or mpirun, or with this
    process alone. If communication is up already, it goes on with these settings.

    Args:
        backends: backends to use; "auto": all that are usable on every rank.
        config: the "mcrdl" block of a ds_config as a dict.
        timeout: how long a call may take, if the config does not say.
    """
    global _started_torch
    install_excepthook()
    block = dict(config or {})
    if backends != AUTO:
        block["backends"] = [backends] if isinstance(backends, str) else list(backends)
    checked = parse(block)
    if dist.is_initialized():
        if current() is None or block:
            for_torch(checked, timeout)
        return
    _started_torch = True
    if "RANK" in os.environ or started_by_mpi():
        if "RANK" not in os.environ:
            from deepspeed.comm.comm import mpi_discovery

            mpi_discovery(verbose=False)
        dist.init_process_group(NAME, timeout=timeout, pg_options=block)
    else:
        dist.init_process_group(NAME, timeout=timeout, pg_options=block, store=HashStore(), rank=0, world_size=1)


def finalize() -> None:
    """End what `init` has started."""
    global _started_torch
    synchronize()
    if _started_torch and dist.is_initialized():
        dist.destroy_process_group()
    _started_torch = False


def is_initialized() -> bool:
    """Return whether communication is up."""
    return current() is not None


def get_backends() -> list[str]:
    """Return the names of the backends in use, in order of preference."""
    return list(_runtime().backends)


def get_rank(group: Any = None) -> int:
    """Return this process's rank in the group."""
    return _runtime().groups.of(group).rank


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of the group."""
    return _runtime().groups.of(group).size


def new_group(ranks: Sequence[int]) -> Any:
    """Return a new torch process group of global `ranks`; every rank of the world calls this."""
    return _runtime().new_group(ranks)


def destroy_group(group: Any) -> None:
    """Free a group made by `new_group`; its members call this."""
    _runtime().forget(group)
    dist.destroy_process_group(group)


def end_step() -> None:
    """A training step is over. Error feedback of compressed calls needs it where no torch optimizer makes the step."""
    compression = _runtime().compression
    if compression is not None:
        compression.compressed.identities.end_step()


def synchronize() -> None:
    """Wait for all asynchronous calls made through this module and not yet waited for."""
    while _outstanding:
        _outstanding.pop(0).wait()


def all_reduce(
    tensor: torch.Tensor, op: Any = "sum", group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Reduce `tensor` of all ranks in place."""
    return _issue(ops.ALL_REDUCE, group, (tensor, op_name(op)), async_op, backend)


def all_reduce_coalesced(
    tensors: Tensors, op: Any = "sum", group: Any = None, async_op: bool = False, backend: str = AUTO
) -> AllOf | None:
    """Reduce each of `tensors`, of any shapes and dtypes, in place."""
    return _noted(composed.all_reduce_coalesced(_runtime(), group, tensors, op_name(op), async_op, backend))


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = "sum", group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Reduce `tensor` of all ranks into that of rank `dst`; the other ranks' tensors may change."""
    return _issue(ops.REDUCE, group, (tensor, dst, op_name(op)), async_op, backend)


def broadcast(
    tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Copy `tensor` of rank `src` to all."""
    return _issue(ops.BROADCAST, group, (tensor, src), async_op, backend)


def all_gather(
    tensor_list: Tensors, tensor: torch.Tensor, group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Gather `tensor` of every rank into `tensor_list`, whose entries may differ in size (alike on all ranks)."""
    return _issue(ops.ALL_GATHER, group, (tensor_list, tensor), async_op, backend)


all_gatherv = all_gather


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Gather `input` of every rank, all of one size, into `output`."""
    return _issue(ops.ALL_GATHER_INTO_TENSOR, group, (output, input), async_op, backend)


def all_gather_coalesced(
    outputs: Tensors, inputs: Tensors, group: Any = None, async_op: bool = False, backend: str = AUTO
) -> AllOf | None:
    """Gather each of `inputs` into the entry of `outputs` at its place."""
    return _noted(composed.all_gather_coalesced(_runtime(), group, outputs, inputs, async_op, backend))


def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Gather `tensor` of every rank, all of one size, into `gather_list` of rank `dst`."""
    return _issue(ops.GATHER, group, (gather_list, tensor, dst), async_op, backend)


def gatherv(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Gather `tensor` of every rank into `gather_list` of rank `dst`; sizes may differ, and only `dst` knows all."""
    return _issue(ops.GATHERV, group, (gather_list, tensor, dst), async_op, backend)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Set `tensor` of every rank to its entry of rank `src`'s `scatter_list`, all of one size."""
    return _issue(ops.SCATTER, group, (tensor, scatter_list, src), async_op, backend)


def scatterv(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Set `tensor` of every rank to its entry of rank `src`'s `scatter_list`; sizes may differ."""
    return _issue(ops.SCATTERV, group, (tensor, scatter_list, src), async_op, backend)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Reduce the entries of `input_list`, which may differ in size, and give each rank its own."""
    return _issue(ops.REDUCE_SCATTER, group, (output, input_list, op_name(op)), async_op, backend)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Reduce `input` of all ranks and give each rank its part."""
    return _issue(ops.REDUCE_SCATTER_TENSOR, group, (output, input, op_name(op)), async_op, backend)


def reduce_scatter_coalesced(
    outputs: Tensors, inputs: Tensors, op: Any = "sum", group: Any = None, async_op: bool = False, backend: str = AUTO
) -> AllOf | None:
    """Reduce each of `inputs` and scatter it into the entry of `outputs` at its place."""
    work = composed.reduce_scatter_coalesced(_runtime(), group, outputs, inputs, op_name(op), async_op, backend)
    return _noted(work)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    backend: str = AUTO,
) -> Work | None:
    """Send part j of `input` to rank j; split sizes are rows, without them the parts are equal."""
    args = (output, input, output_split_sizes or None, input_split_sizes or None)
    return _issue(ops.ALL_TO_ALL_SINGLE, group, args, async_op, backend)


all_to_allv = all_to_all_single


def all_to_all(
    output_list: Tensors, input_list: Tensors, group: Any = None, async_op: bool = False, backend: str = AUTO
) -> Work | None:
    """Send entry j of `input_list` to rank j."""
    return _issue(ops.ALL_TO_ALL, group, (output_list, input_list), async_op, backend)


def send(tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, backend: str = AUTO) -> None:
    """Send `tensor` to rank `dst`."""
    _runtime().issue(ops.SEND, group, (tensor, dst, tag), backend=backend)


def recv(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, backend: str = AUTO) -> int:
    """Receive into `tensor` from rank `src`, or from any rank; return the sender's rank."""
    work = _runtime().issue(ops.RECV, group, (tensor, src, tag), async_op=True, backend=backend)
    assert work is not None
    work.wait()
    return work.source_rank()


def isend(tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0, backend: str = AUTO) -> Work:
    """Start to send `tensor` to rank `dst`."""
    work = _issue(ops.SEND, group, (tensor, dst, tag), True, backend)
    assert work is not None
    return work


def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, backend: str = AUTO) -> Work:
    """Start to receive into `tensor` from rank `src`, or from any rank."""
    work = _issue(ops.RECV, group, (tensor, src, tag), True, backend)
    assert work is not None
    return work


def batch_isend_irecv(messages: Sequence[Any], backend: str = AUTO) -> list[Work]:
    """Start the messages given as torch.distributed.P2POp."""
    given = [(m.op.__name__, m.tensor, m.peer, m.group, m.tag) for m in messages]
    works = composed.batch_isend_irecv(_runtime(), given, backend)
    for work in works:
        _noted(work)
    return works


def barrier(group: Any = None, async_op: bool = False, backend: str = AUTO) -> Work | None:
    """Return when every rank of the group is here."""
    return _issue(ops.BARRIER, group, (), async_op, backend)


def monitored_barrier(group: Any = None, timeout: timedelta = _TIMEOUT, wait_all_ranks: bool = False) -> None:
    """Return when every rank of the group is here; after `timeout` raise an error that names who is not."""
    runtime = _runtime()
    runtime.monitored_barrier(runtime.groups.of(group), timeout.total_seconds(), wait_all_ranks)


def broadcast_object_list(objects: list[Any], src: int = 0, group: Any = None, backend: str = AUTO) -> None:
    """Replace the entries of `objects`, anything that can be pickled, with those of rank `src`."""
    composed.broadcast_object_list(_runtime(), group, objects, src, backend=backend)


def all_gather_object(objects: list[Any], value: Any, group: Any = None, backend: str = AUTO) -> None:
    """Fill `objects` with every rank's `value`."""
    composed.all_gather_object(_runtime(), group, objects, value, backend)


def gather_object(
    value: Any, objects: list[Any] | None = None, dst: int = 0, group: Any = None, backend: str = AUTO
) -> None:
    """Fill `objects` of rank `dst` with every rank's `value`."""
    composed.gather_object(_runtime(), group, value, objects, dst, backend)


def scatter_object_list(
    output: list[Any], inputs: list[Any] | None = None, src: int = 0, group: Any = None, backend: str = AUTO
) -> None:
    """Set the first entry of `output` to this rank's entry of rank `src`'s `inputs`."""
    composed.scatter_object_list(_runtime(), group, output, inputs, src, backend)


def log_summary() -> list[dict[str, Any]]:
    """Print on rank 0 the figures of its communication since the start or `log_reset`; return this rank's rows.

    Needs "observe": {"log": true} in the config. docs/OBSERVE.md says what is in a row.
    """
    rows, elapsed_ns = _session().rows()
    if _runtime().rank == 0:
        show(rows, elapsed_ns)
    return rows


def log_reset(label: str = "") -> None:
    """Count anew; the line that the log ends with carries `label`, such as "epoch 3"."""
    _session().reset(label)


def log_step(samples: int = 0) -> None:
    """Tell the log that a step of the training ends here, on `samples` samples of all ranks together.

    DeepSpeed's engine tells it by itself.
    """
    _session().step(samples)


def log_stragglers() -> list[dict[str, Any]]:
    """Print on rank 0 which rank comes last to which collectives, and how late; every rank of the job calls this.

    Needs "observe": {"stragglers": true}. Returns the rows, the same on all ranks.
    """
    rows = _session().stragglers()
    if _runtime().rank == 0:
        stragglers.show(rows)
    return rows


def _session() -> Session:
    session = _runtime().session
    if session is None:
        raise CallError('nothing is observed: add "observe": {"log": true} to the "mcrdl" block')
    return session


def _runtime() -> Runtime:
    runtime = current()
    if runtime is None:
        raise CallError("communication is not up: call deepspeed_mcrdl.init() first")
    return runtime


def _issue(operation: Operation, group: Any, args: tuple[Any, ...], async_op: bool, backend: str) -> Work | None:
    return _noted(_runtime().issue(operation, group, args, async_op, backend))


def _noted(work: _W) -> _W:
    """Keep an asynchronous call for `synchronize`; those done are let go now and then."""
    if work is not None:
        _outstanding.append(work)
        if len(_outstanding) % _MOST_OUTSTANDING == 0:
            _outstanding[:] = [each for each in _outstanding if not each.advance()]
    return work
