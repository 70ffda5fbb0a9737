"""Operations made of operations: coalesced forms, batches of messages, object collectives.

Whatever face a call comes through, it is made of catalogue entries here, so that every part of it is routed. `backend`
is a backend's name or "auto", as in Runtime.issue.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import AUTO
from deepspeed_mcrdl.errors import CallError, UnsupportedError
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.work import AllOf, Work


def _each(
    runtime: Runtime,
    operation: Operation,
    torch_group: Any,
    calls: Sequence[tuple[Any, ...]],
    async_op: bool,
    backend: str,
) -> AllOf | None:
    started = [runtime.issue(operation, torch_group, args, async_op=True, backend=backend) for args in calls]
    work = AllOf([work for work in started if work is not None])
    if async_op:
        return work
    work.wait()
    return None


def _pairs(name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(outputs) != len(inputs):
        raise CallError(f"{name}: {len(outputs)} outputs for {len(inputs)} inputs")
    return list(zip(outputs, inputs, strict=True))


def all_reduce_coalesced(
    runtime: Runtime,
    torch_group: Any,
    tensors: Sequence[torch.Tensor],
    op: str,
    async_op: bool,
    backend: str = AUTO,
) -> AllOf | None:
    """All-reduce each of `tensors` (any shapes and dtypes) in place."""
    return _each(runtime, ops.ALL_REDUCE, torch_group, [(t, op) for t in tensors], async_op, backend)


def all_reduce_sparse(runtime: Runtime, torch_group: Any, tensor: torch.Tensor, op: str, backend: str = AUTO) -> None:
    """Add up a sparse COO `tensor` of all ranks in place; blocks."""
    if op != "sum" or tensor.layout is not torch.sparse_coo:
        raise UnsupportedError(
            f"all_reduce {op} of a {tensor.layout} tensor: only sums of sparse COO tensors are known"
        )
    own = tensor.coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    counts = [size // max(1, indices.shape[0]) for size in _sizes_of_all(runtime, torch_group, indices, backend)]
    # Transposed, so that a rank's part is one block of rows.
    all_indices = [indices.new_empty(count, indices.shape[0]) for count in counts]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
    runtime.issue(ops.ALL_GATHER, torch_group, (all_indices, indices.t().contiguous()), backend=backend)
    runtime.issue(ops.ALL_GATHER, torch_group, (all_values, values), backend=backend)
    total = torch.sparse_coo_tensor(torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def reduce_scatter_coalesced(
    runtime: Runtime,
    torch_group: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: str,
    async_op: bool,
    backend: str = AUTO,
) -> AllOf | None:
    """Reduce each of `inputs` and scatter it into the entry of `outputs` at its place."""
    calls = [(output, input, op) for output, input in _pairs("reduce_scatter_coalesced", outputs, inputs)]
    return _each(runtime, ops.REDUCE_SCATTER_TENSOR, torch_group, calls, async_op, backend)


def all_gather_coalesced(
    runtime: Runtime,
    torch_group: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
    backend: str = AUTO,
) -> AllOf | None:
    """Gather each of `inputs` into the entry of `outputs` at its place."""
    calls = _pairs("all_gather_coalesced", outputs, inputs)
    return _each(runtime, ops.ALL_GATHER_INTO_TENSOR, torch_group, calls, async_op, backend)


def all_gather_lists(
    runtime: Runtime,
    torch_group: Any,
    output_lists: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
    backend: str = AUTO,
) -> AllOf | None:
    """Gather each of `inputs` into the tensors at its place of the ranks' lists, as torch's old interface has it."""
    calls = _pairs("all_gather_coalesced", [list(row) for row in zip(*output_lists, strict=True)], inputs)
    return _each(runtime, ops.ALL_GATHER, torch_group, calls, async_op, backend)


def batch_isend_irecv(
    runtime: Runtime, messages: Sequence[tuple[str, torch.Tensor, int, Any, int]], backend: str = AUTO
) -> list[Work]:
    """Start messages given as ("isend" or "irecv", tensor, global peer rank, torch group, tag)."""
    works = []
    for kind, tensor, peer, torch_group, tag in messages:
        operation = ops.SEND if kind == "isend" else ops.RECV
        works.append(runtime.issue(operation, torch_group, (tensor, peer, tag), async_op=True, backend=backend))
    return [work for work in works if work is not None]


def _device(runtime: Runtime, device: Any = None) -> torch.device:
    """Return where objects travel: a device that a backend in use takes."""
    if device is not None:
        return torch.device(device)
    takes_cpu = any("cpu" in backend.devices for backend in runtime.backends.values())
    return torch.device("cpu") if takes_cpu else torch.device("cuda", torch.cuda.current_device())


def _pickled(value: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(data: torch.Tensor) -> Any:
    # As with torch.distributed's own object collectives the senders are ranks of this very job.
    return pickle.loads(data.cpu().numpy().tobytes())


def _sizes_of_all(runtime: Runtime, torch_group: Any, data: torch.Tensor, backend: str) -> list[int]:
    own = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    sizes = torch.empty(runtime.groups.of(torch_group).size, dtype=torch.int64, device=data.device)
    runtime.issue(ops.ALL_GATHER_INTO_TENSOR, torch_group, (sizes, own), backend=backend)
    return [int(size) for size in sizes.tolist()]


def broadcast_object_list(
    runtime: Runtime, torch_group: Any, objects: list[Any], src: int, device: Any = None, backend: str = AUTO
) -> None:
    """Replace the entries of `objects` with those of global rank `src`."""
    device = _device(runtime, device)
    is_source = runtime.rank == src
    data = _pickled(list(objects), device) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    runtime.issue(ops.BROADCAST, torch_group, (size, src), backend=backend)
    if not is_source:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    runtime.issue(ops.BROADCAST, torch_group, (data, src), backend=backend)
    if not is_source:
        received = _unpickled(data)
        if len(received) != len(objects):
            raise CallError(f"broadcast_object_list: {len(objects)} places for {len(received)} objects of rank {src}")
        objects[:] = received


def all_gather_object(runtime: Runtime, torch_group: Any, objects: list[Any], value: Any, backend: str = AUTO) -> None:
    """Fill `objects` with every rank's `value`, in group order."""
    data = _pickled(value, _device(runtime))
    parts = [data.new_empty(size) for size in _sizes_of_all(runtime, torch_group, data, backend)]
    runtime.issue(ops.ALL_GATHER, torch_group, (parts, data), backend=backend)
    objects[:] = [_unpickled(part) for part in parts]


def gather_object(
    runtime: Runtime, torch_group: Any, value: Any, objects: list[Any] | None, dst: int, backend: str = AUTO
) -> None:
    """Fill `objects` of global rank `dst` with every rank's `value`, in group order."""
    data = _pickled(value, _device(runtime))
    sizes = _sizes_of_all(runtime, torch_group, data, backend)
    is_root = runtime.rank == dst
    if is_root and objects is None:
        raise CallError("gather_object: the root rank must give a list for the objects")
    parts = [data.new_empty(size) for size in sizes] if is_root else None
    runtime.issue(ops.GATHERV, torch_group, (parts, data, dst), backend=backend)
    if parts is not None and objects is not None:
        objects[:] = [_unpickled(part) for part in parts]


def scatter_object_list(
    runtime: Runtime, torch_group: Any, output: list[Any], inputs: list[Any] | None, src: int, backend: str = AUTO
) -> None:
    """Set the first entry of `output` to this rank's entry of the `inputs` of global rank `src`."""
    group = runtime.groups.of(torch_group)
    device = _device(runtime)
    parts = None
    if runtime.rank == src:
        if inputs is None or len(inputs) != group.size:
            raise CallError(f"scatter_object_list: the root rank must give {group.size} objects")
        parts = [_pickled(value, device) for value in inputs]
    sizes = torch.tensor([part.numel() for part in parts] if parts else [0] * group.size, device=device)
    runtime.issue(ops.BROADCAST, torch_group, (sizes, src), backend=backend)
    data = torch.empty(int(sizes[group.rank].item()), dtype=torch.uint8, device=device)
    runtime.issue(ops.SCATTERV, torch_group, (data, parts, src), backend=backend)
    output[0] = _unpickled(data)
