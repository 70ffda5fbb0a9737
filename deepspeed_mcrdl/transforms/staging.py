"""GPU tensors on a backend that takes host memory: copied out, carried, and copied back, in stream order.

A call reads what the caller's stream had written when it was made, and whoever waits for it goes on in stream order.
Making the call blocks nobody: the backend starts it in a later poll, when its data has come, and never before an
earlier call of the same lane (`Turns`), since the ranks must start those in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.streams import Device
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import Pending

Method = Callable[..., Pending]


def through_host(
    operation: Operation, method: Method, device_of: Callable[[torch.Tensor], Device | None], turns: Turns
) -> Method:
    """Return `method`, which takes host memory, made fit for tensors of a device, strided ones too.

    It blocks nobody. The Pending is done when the results are on the device, and can be ordered by streams as soon as
    their copying has been issued.

    Args:
        operation: the operation.
        method: the backend's method for it.
        device_of: tensor -> the device it is on, None for host memory, which is handed on as it is.
        turns: the backend's; its calls on host memory must go through `in_turn`.
    """

    def call(group: Group, *args: Any) -> Pending:
        inputs, outputs = operation.tensors(*args)
        devices = {id(tensor): device for tensor in _tensors(args) if (device := device_of(tensor)) is not None}
        device = next(iter(devices.values()))
        buffers = {id(tensor): device.host_buffer(tensor) for tensor in _tensors(args) if id(tensor) in devices}
        # Only the root of a gather writes; copied back, anything else's buffers would overwrite the outputs.
        writes = operation.root(*args) in (None, group.ranks[group.rank])
        sent = {id(tensor): tensor for tensor in (inputs if writes else (*inputs, *outputs)) if id(tensor) in devices}
        aside = Aside(device)
        with aside.on():
            for key, tensor in sent.items():
                device.copy(buffers[key], tensor)
            copied = device.record()
        on_host = [_replaced(argument, buffers) for argument in args]
        turn = turns.take(
            _lane(operation, group, args),
            lambda: method(group, *on_host),
            (lambda: device.done(copied)) if sent else (lambda: True),
        )
        results = {id(tensor): (tensor, buffers[id(tensor)]) for tensor in outputs if id(tensor) in devices}

        def copy_back() -> None:
            for tensor, buffer in results.values():
                device.copy(tensor, buffer)

        return aside.then(turn, copy_back, (args, on_host))

    return call


def in_turn(operation: Operation, method: Method, turns: Turns) -> Method:
    """Return `method`, called on host memory, made not to overtake the staged calls of its lane."""

    def call(group: Group, *args: Any) -> Pending:
        lane = _lane(operation, group, args)
        if turns.free(lane):
            return method(group, *args)
        return turns.take(lane, lambda: method(group, *args), lambda: True)

    return call


def _lane(operation: Operation, group: Group, args: tuple[Any, ...]) -> Hashable:
    if operation.collective:
        return group
    _, peer, tag = args
    # A receive may be from any rank, so those with one tag stay in order, whoever they are from.
    return (group, "send", peer, tag) if operation.name == "send" else (group, "recv", tag)


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for entry in argument:
            yield from _tensors(entry)


def _replaced(argument: Any, buffers: dict[int, torch.Tensor]) -> Any:
    if isinstance(argument, torch.Tensor):
        return buffers.get(id(argument), argument)
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return [_replaced(entry, buffers) for entry in argument]
    return argument
