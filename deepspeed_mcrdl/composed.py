"""Operations made of operations: coalesced forms, batches of messages, object collectives.

Whatever face a call comes through, it is made of catalogue entries here, so that every part of it is routed.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.errors import CallError
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.work import AllOf, Work


def _all(works: Sequence[Work | None], async_op: bool) -> AllOf | None:
    work = AllOf([work for work in works if work is not None])
    if async_op:
        return work
    work.wait()
    return None


def all_reduce_coalesced(
    runtime: Runtime, torch_group: Any, tensors: Sequence[torch.Tensor], op: str, async_op: bool
) -> AllOf | None:
    """All-reduce each of `tensors` (any shapes and dtypes) in place."""
    return _all([runtime.issue(ops.ALL_REDUCE, torch_group, (t, op), async_op=True) for t in tensors], async_op)


def all_gather_coalesced(
    runtime: Runtime,
    torch_group: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
) -> AllOf | None:
    """Gather each of `inputs` into the entry of `outputs` at its place."""
    if len(outputs) != len(inputs):
        raise CallError(f"all_gather_coalesced: {len(outputs)} outputs for {len(inputs)} inputs")
    works = [
        runtime.issue(ops.ALL_GATHER_INTO_TENSOR, torch_group, (output, input), async_op=True)
        for output, input in zip(outputs, inputs, strict=True)
    ]
    return _all(works, async_op)


def batch_isend_irecv(runtime: Runtime, messages: Sequence[tuple[str, torch.Tensor, int, Any, int]]) -> list[Work]:
    """Start messages given as ("isend" or "irecv", tensor, global peer rank, torch group, tag)."""
    works = []
    for kind, tensor, peer, torch_group, tag in messages:
        operation = ops.SEND if kind == "isend" else ops.RECV
        works.append(runtime.issue(operation, torch_group, (tensor, peer, tag), async_op=True))
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


def broadcast_object_list(runtime: Runtime, torch_group: Any, objects: list[Any], src: int, device: Any = None) -> None:
    """Replace the entries of `objects` with those of global rank `src`."""
    device = _device(runtime, device)
    is_source = runtime.rank == src
    data = _pickled(list(objects), device) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    runtime.issue(ops.BROADCAST, torch_group, (size, src))
    if not is_source:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    runtime.issue(ops.BROADCAST, torch_group, (data, src))
    if not is_source:
        received = _unpickled(data)
        if len(received) != len(objects):
            raise CallError(f"broadcast_object_list: {len(objects)} places for {len(received)} objects of rank {src}")
        objects[:] = received


def all_gather_object(runtime: Runtime, torch_group: Any, objects: list[Any], value: Any) -> None:
    """Fill `objects` with every rank's `value`, in group order."""
    device = _device(runtime)
    group = runtime.groups.of(torch_group)
    data = _pickled(value, device)
    sizes = torch.empty(group.size, dtype=torch.int64, device=device)
    own = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    runtime.issue(ops.ALL_GATHER_INTO_TENSOR, torch_group, (sizes, own))
    # Padded to the largest: all backends have the even form.
    longest = int(sizes.max().item())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everything = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    runtime.issue(ops.ALL_GATHER_INTO_TENSOR, torch_group, (everything, padded))
    for place, (row, size) in enumerate(zip(everything.view(group.size, longest), sizes.tolist(), strict=True)):
        objects[place] = _unpickled(row[:size])
