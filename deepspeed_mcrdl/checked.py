"""Checked mode: before data moves, the members of a group compare their calls, and each raises what does not fit.

The calls meet in the job's store, so that nothing depends on a backend. A wrong operation, dtype, shape, reduce
operation, root or split size is found at once, on every member; a call that a rank leaves out when that rank makes its
next one in the group, or else within "timeout_s". A message is compared by its receiver.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from deepspeed_mcrdl.errors import MismatchError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.work import Pending

Method = Callable[..., Pending]


class Checked:
    """Compares the ranks' calls.

    Args:
        store: the job's store, the connection in which nobody waits.
        rank: this process's global rank.
        progress: who waits for the others to come.
    """

    def __init__(self, store: Store, rank: int, progress: Progress) -> None:
        self._store = PrefixStore("checked", store)
        self._rank = rank
        self._progress = progress
        self._messages: Counter[tuple[Any, ...]] = Counter()
        self._from_any: set[tuple[Group, int]] = set()

    def around(self, operation: Operation, backend: str, method: Method) -> Method:
        """Return `method` with a comparison before it."""
        if operation.collective:

            def call(group: Group, *args: Any) -> Pending:
                self._compare(Call(operation, group, backend, group.calls), args)
                return method(group, *args)

            return call
        return self._around_send(operation, method) if operation.name == "send" else self._around_recv(method)

    def _compare(self, call: Call, args: tuple[Any, ...]) -> None:
        operation, group, _, number = call
        keys = [f"{group.number}/{number}/{index}" for index in range(group.size)]
        sends, receives = operation.blocks(group, *args)
        told = {
            "text": describe(operation, args) + _parts(sends, receives),
            "same": [operation.name, *map(str, operation.same(group, *args))],
            "sends": sends,
            "receives": receives,
        }
        self._store.set(keys[group.rank], json.dumps(told))
        everybody_here = _Keys(self._store, keys)
        self._progress.finish(everybody_here.poll, everybody_here, call)
        members = [json.loads(text) for text in self._store.multi_get(keys)]
        # All are here, so all have read what they wrote for the call before.
        if number is not None and number > 1:
            self._store.delete_key(f"{group.number}/{number - 1}/{group.rank}")
        if not _fit(members):
            raise MismatchError(
                f"{operation.name} #{number} on {group}: the ranks' calls don't fit together: "
                f"{_by_text(group.ranks, [member['text'] for member in members])}"
            )

    def _around_send(self, operation: Operation, method: Method) -> Method:
        def send(group: Group, tensor: torch.Tensor, dst: int, tag: int) -> Pending:
            channel = (group.number, self._rank, dst, tag)
            self._messages[channel] += 1
            self._store.set(_message_key(channel, self._messages[channel]), describe(operation, (tensor, dst, tag)))
            return method(group, tensor, dst, tag)

        return send

    def _around_recv(self, method: Method) -> Method:
        def recv(group: Group, tensor: torch.Tensor, src: int | None, tag: int) -> Pending:
            pending = method(group, tensor, src, tag)
            if src is None:
                self._from_any.add((group, tag))  # from now on it is not known which message meets which receive
            if (group, tag) in self._from_any:
                return pending
            channel = (group.number, src, self._rank, tag)
            self._messages[channel] += 1
            key = _message_key(channel, self._messages[channel])
            where = f"recv from rank {src} with tag {tag} on {group}"
            return _ComparedMessage(pending, self._store, key, tensor, where)

        return recv


class _Keys(Pending):
    """Done when all keys are in the store."""

    yields_s = 0.001

    def __init__(self, store: Store, keys: list[str]) -> None:
        self._store = store
        self._keys = keys

    def poll(self) -> bool:
        return self._store.check(self._keys)


class _ComparedMessage(Pending):
    """A receive that first looks at what its sender says it has sent."""

    def __init__(self, pending: Pending, store: Store, key: str, tensor: torch.Tensor, where: str) -> None:
        self._pending = pending
        self._store: Store | None = store
        self._key = key
        self._content = content(tensor)
        self._where = where
        self._arrived = False
        self.host_driven = pending.host_driven
        self.stream_ordered = pending.stream_ordered

    def poll(self) -> bool:
        self._compare()
        # The store is told before the message is sent, but may hear of it after the message has come.
        self._arrived = self._arrived or self._pending.poll()
        return self._arrived and self._store is None

    def _compare(self) -> None:
        if self._store is not None and self._store.check([self._key]):
            sent = self._store.get(self._key).decode().removeprefix("send of ")
            self._store.delete_key(self._key)
            self._store = None
            if _size(sent) != _size(self._content):
                raise MismatchError(f"{self._where}: a message of {sent} meets a receive of {self._content}")

    def block(self, limit_s: float) -> None:
        self._pending.block(min(limit_s, 0.01))

    def orderable(self) -> bool:
        self._compare()
        return self._store is None and self._pending.orderable()

    def order(self) -> None:
        self._pending.order()

    def source_rank(self) -> int:
        return self._pending.source_rank()


def content(*tensors: torch.Tensor) -> str:
    """Return dtype and shapes in words, such as "float32 (2, 3)"."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return f"{dtype} {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"


def describe(operation: Operation, args: tuple[Any, ...]) -> str:
    """Return a call in words, such as "all_reduce sum of float32 (2, 3)"."""
    inputs, outputs = operation.tensors(*args)
    text = f"{operation.name} {args[-1]}" if operation.reduces else operation.name
    root = operation.root(*args)
    if root is not None:
        text += f" with root {root}"
    if inputs:
        text += f" of {content(*inputs)}"
    if outputs and [id(tensor) for tensor in outputs] != [id(tensor) for tensor in inputs]:
        text += f" into {content(*outputs)}"
    return text


def _parts(sends: list[int] | None, receives: list[int] | None) -> str:
    return "" if sends is None else f", sending {sends} and receiving {receives} elements"


def _size(described: str) -> tuple[str, int]:
    dtype, _, shape = described.partition(" ")
    return dtype, torch.Size(int(n) for n in shape.strip("()").split(",") if n.strip()).numel()


def _message_key(channel: tuple[Any, ...], number: int) -> str:
    return "/".join(map(str, ("message", *channel, number)))


def _fit(members: Sequence[dict[str, Any]]) -> bool:
    if any(member["same"] != members[0]["same"] for member in members):
        return False
    return all(
        sender["sends"] is None or receiver["receives"] is None or sender["sends"][j] == receiver["receives"][i]
        for i, sender in enumerate(members)
        for j, receiver in enumerate(members)
    )


def _by_text(ranks: Sequence[int], texts: Sequence[str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in by_text.items())
