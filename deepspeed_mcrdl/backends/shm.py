"""Memory shared by the ranks of one host: CPU tensors, copied in and out of it or straight from rank to rank.

The loops are in the extension `_shm` (backends/native/, whose files say how the ranks talk to each other). Here are the
segments: each group has one for its collectives, the ranks of a host have one for their messages.

A sum is added up in the order of the group's ranks on every rank, so all get the same bits; 16-bit floats are added up
in float32 and rounded once.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import (
    ARITHMETIC_OPS,
    BIT_OPS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MESSAGE_TAGS,
    MOVABLE,
    Backend,
    Job,
    apart,
    message_tag,
)
from deepspeed_mcrdl.backends.shm_segments import FOLDER, Peers, halves, make_segment
from deepspeed_mcrdl.errors import MCRDLError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.machine import cores
from deepspeed_mcrdl.operations import Operation, counts
from deepspeed_mcrdl.stores import Patient, exchange
from deepspeed_mcrdl.work import DONE, Pending

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SLOTS = 32  # of a rank: how far it puts ahead of ranks whose cores are taken
_LEAST_SLOTS = 4
_GROUP_BYTES = 8 * 1024 * 1024  # that a group's slots may take, if there are more than the least
_GROUPS = 64  # for which there must be room
SLOT_BYTES = 128 * 1024
_LEAST_SLOT_BYTES = 4 * 1024
_RING_BYTES = 1024 * 1024
_ALL_RINGS_BYTES = 16 * 1024 * 1024
_LEAST_RING_BYTES = 8 * 1024
# Bytes from which blocks and messages are read out of the other process by the kernel rather than copied twice in the
# caches. Never, by default: it was slower at every size where we measured (docs/ARCHITECTURE.md).
SINGLE_COPY = "MCRDL_SHM_SINGLE_COPY_BYTES"
_NEVER = 2**62
_SPLIT_BYTES = 16 * 1024  # all_reduce of more than two ranks: from here on each reduces a part
_SPINS = 200
_YIELDS = 4  # with more ranks than cores: how often a call gives its core away before it returns to the wait loop
_SLEEPS_BETWEEN_WATCHES = 100  # each of at most a millisecond
_MAX_TAG = 2**62

# The order of the tables in native/reduce_kernels.h.
_TYPES = {
    dtype: place
    for place, dtype in enumerate(
        (
            *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        )
    )
}
_OPS = {op: place for place, op in enumerate(("sum", "avg", "min", "max", "product", "band", "bor", "bxor"))}


def _single_copy_bytes() -> int:
    text = os.environ.get(SINGLE_COPY, str(_NEVER))
    if not text.isdecimal():
        raise MCRDLError(f'{SINGLE_COPY} must be a number of bytes, got "{text}"')
    return int(text)


def _room(ranks: int, whole: int) -> int:
    """Return the bytes that the slots of each rank of a group are to take, of `whole` bytes each if there is room."""
    folder = os.statvfs(FOLDER)
    of_group = min(_GROUP_BYTES, folder.f_blocks * folder.f_frsize // _GROUPS)
    return whole * min(_SLOTS, max(_LEAST_SLOTS, of_group // (ranks * whole)))


def _slots(room: int, whole: int) -> tuple[int, int]:
    """Return how many slots there are in so many bytes, and the bytes of each: fewer ones before smaller ones."""
    slots = max(_LEAST_SLOTS, room // whole)
    return slots, min(whole, room // slots)


def _extension() -> ModuleType | None:
    try:
        from deepspeed_mcrdl.backends import _shm
    except ImportError:
        return None
    return _shm


def _reductions() -> dict[tuple[torch.dtype, str], tuple[int, int, int]]:
    """Return (dtype, op) -> what the extension calls them: type, operation, bytes of an element."""
    table = {(dtype, op): (_TYPES[dtype], _OPS[op], dtype.itemsize) for dtype in _TYPES for op in _OPS}
    for op in _OPS:
        # The sum of truth values is their "or"; a sum of bytes would be 2.
        table[torch.bool, op] = (_TYPES[torch.uint8], _OPS["max" if op == "sum" else op], 1)
    for dtype, part in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        for op in ("sum", "avg"):
            table[dtype, op] = table[part, op]
    return table


_REDUCTIONS = _reductions()


class ShmPending(Pending):
    """An operation in shared memory.

    Args:
        handle: the extension's Operation or Message.
        peers: who may end before it is done.
        ranks: global ranks by place, to name the source of a message.
    """

    host_driven = True

    def __init__(self, handle: Any, peers: Peers, ranks: Sequence[int]) -> None:
        self._handle = handle
        self._peers = peers
        self._ranks = ranks
        self._sleeps = 0

    def poll(self) -> bool:
        done: bool = self._handle.poll()
        return done

    def block(self, limit_s: float) -> None:
        self._handle.block(limit_s)
        self._sleeps += 1
        if self._sleeps % _SLEEPS_BETWEEN_WATCHES:
            return
        gone = self._peers.gone(self._ranks)
        if gone is not None and not self._handle.poll():  # what it has left in shared memory is still there
            raise MCRDLError(f"rank {gone} has ended before the call was done; see its output")

    def source_rank(self) -> int:
        place: int = self._handle.source()
        return self._ranks[place]


class ShmBackend(Backend):
    """Shared memory between the ranks of one host."""

    name = "shm"
    preference = 15
    devices = frozenset({"cpu"})
    one_host = True
    dtypes = MOVABLE
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS, ARITHMETIC_OPS | BIT_OPS),
        **dict.fromkeys(COMPLEX, frozenset({"sum", "avg"})),
        torch.bool: ARITHMETIC_OPS | BIT_OPS,
    }

    @classmethod
    def unusable(cls) -> str | None:
        if _extension() is None:
            return "built without its C extension: it needs a C compiler when deepspeed_mcrdl is installed"
        return None if os.access(FOLDER, os.W_OK) else f"{FOLDER} can't be written to"

    @classmethod
    def version(cls) -> str:
        return f"deepspeed_mcrdl {version('deepspeed_mcrdl')}"

    def details(self) -> str:
        return f"single copies from {self._single_copy} bytes on" if self._pids[0] else ""

    def __init__(self, job: Job) -> None:
        extension = _extension()
        assert extension is not None  # unusable() says so first
        self._extension = extension
        self._job = job
        self._patient = Patient(job.quick_store)
        self._store = PrefixStore(self.name, self._patient)
        self._ranks = [rank for rank in range(job.world_size) if job.hosts[rank] == job.hosts[job.rank]]
        self._place = self._ranks.index(job.rank)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._spins = _SPINS if len(self._ranks) <= cores() else -_YIELDS
        self._groups: dict[Group, Any] = {}
        visible = self._look_around()
        n = len(self._ranks)
        roster, _ = self._segment(f"roster/{self._ranks[0]}", self._ranks, lambda _: n, [0])
        self._peers = Peers(mmap.mmap(roster, n), self._ranks, self._place, visible)
        os.close(roster)
        most = min(_RING_BYTES, max(_LEAST_RING_BYTES, _ALL_RINGS_BYTES // n**2))
        rings, ring = self._segment(
            f"rings/{self._ranks[0]}",
            self._ranks,
            lambda size: extension.Messages.size(n, size),
            halves(most, _LEAST_RING_BYTES),
        )
        self._messages = extension.Messages(rings, self._place, n, ring, self._single_copy, self._spins, self._pids)
        os.close(rings)
        self._progress = job.progress
        self._turn: Callable[[], object] = self._messages.turn
        self._progress.add_engine(self._turn)
        # The operations whose calls are so short that looking things up would be half of them.
        self._short: dict[Operation, Callable[..., Callable[..., Pending]]] = {
            ops.ALL_REDUCE: self._all_reduce,
            ops.ALL_GATHER_INTO_TENSOR: self._all_gather_into_tensor,
            ops.REDUCE_SCATTER_TENSOR: self._reduce_scatter_tensor,
            ops.ALL_TO_ALL_SINGLE: self._all_to_all_single,
            ops.SEND: self._send,
            ops.RECV: self._recv,
        }

    def _look_around(self) -> list[int]:
        """Settle with this host's ranks whether they read each other's memory, and from which size on.

        Returns:
            Process ids by place, as far as they mean the same here; 0 for others.
        """
        boot, namespace = _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/pid")
        here = [boot, namespace, os.getpid(), self._extension.where(), _single_copy_bytes()]
        told = self._exchange("here", here)
        if len({other for other, *_ in told}) > 1:
            raise MCRDLError(f"the host name {self._job.hosts[self._job.rank]} is that of several machines")
        self._single_copy: int = max(size for *_, size in told)  # one for all, whatever each one's environment says
        visible = [pid if space == namespace else 0 for _, space, pid, *_ in told]
        readable = self._single_copy < _NEVER and all(
            pid and self._extension.can_read(pid, address)
            for pid, (_, _, _, address, _) in zip(visible, told, strict=True)
        )
        direct = all(self._exchange("readable", readable))
        self._pids = visible if direct else [0] * len(told)
        return visible

    def _exchange(self, what: str, value: Any) -> list[Any]:
        job = self._job
        key = f"{self.name}/{what}"
        everybody = exchange(job.quick_store, key, job.rank, job.world_size, value, job.start_timeout_s)
        return [everybody[rank] for rank in self._ranks]

    def _segment(
        self, key: str, ranks: Sequence[int], size: Callable[[int], int], choices: Sequence[int]
    ) -> tuple[int, int]:
        return make_segment(self._store, self._job.rank, key, ranks, size, choices)

    def join(self, group: Group) -> None:
        n = group.size
        # A slot takes a part for each rank, and the address of a block for each.
        least = max(_LEAST_SLOT_BYTES, n * 256)
        whole = max(SLOT_BYTES, least)
        descriptor, room = self._segment(
            f"group/{group.number}",
            group.ranks,
            lambda room: self._extension.Collectives.size(n, *_slots(room, whole)),
            halves(_room(n, whole), _LEAST_SLOTS * least),
        )
        slots, slot_bytes = _slots(room, whole)
        pids = [self._pids[self._places[rank]] for rank in group.ranks]
        try:
            self._groups[group] = self._extension.Collectives(
                descriptor, group.rank, n, slots, slot_bytes, self._single_copy, self._spins, pids
            )
        finally:
            os.close(descriptor)

    def leave(self, group: Group) -> None:
        collectives = self._groups.pop(group, None)
        if collectives is not None:
            collectives.close()

    def close(self) -> None:
        self._progress.remove_engine(self._turn)
        self._peers.close()
        for group in tuple(self._groups):
            self.leave(group)
        self._messages.close()

    def method(self, operation: Operation, group: Group, args: tuple[Any, ...]) -> Callable[..., Pending]:
        short = self._short.get(operation)
        return super().method(operation, group, args) if short is None else short(group, *args)

    def _pending(self, handle: Any, group: Group) -> Pending:
        return DONE if handle is None else ShmPending(handle, self._peers, group.ranks)

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        return self._all_reduce(group, tensor, op)(group, tensor, op)

    def _all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Callable[..., Pending]:
        reduce, reduction, peers = self._groups[group].reduce, _REDUCTIONS[tensor.dtype, op], self._peers
        fixed = (tensor.nbytes, *reduction, -1, _SPLIT_BYTES)

        def all_reduce(group: Group, tensor: torch.Tensor, op: str) -> Pending:
            handle = reduce(tensor.data_ptr(), *fixed, tensor)
            return DONE if handle is None else ShmPending(handle, peers, group.ranks)

        return all_reduce

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str) -> Pending:
        reduction = _REDUCTIONS[tensor.dtype, op]
        root = group.index(dst)
        handle = self._groups[group].reduce(tensor.data_ptr(), tensor.nbytes, *reduction, root, _SPLIT_BYTES, tensor)
        return self._pending(handle, group)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int) -> Pending:
        handle = self._groups[group].broadcast(tensor.data_ptr(), tensor.nbytes, group.index(src), tensor)
        return self._pending(handle, group)

    def all_gather_into_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._all_gather_into_tensor(group, output, input)(group, output, input)

    def _all_gather_into_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor
    ) -> Callable[..., Pending]:
        gather, peers, block = self._groups[group].all_gather, self._peers, input.nbytes
        own, whole = group.rank * block, group.size * block

        def all_gather_into_tensor(group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
            source, target = input.data_ptr(), output.data_ptr()
            if source != target + own and source < target + whole and target < source + block:
                input = input.clone()
                source = input.data_ptr()
            handle = gather(source, target, block, (output, input))
            return DONE if handle is None else ShmPending(handle, peers, group.ranks)

        return all_gather_into_tensor

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor) -> Pending:
        return self._gather(group, outputs, input, agreed=True)

    def gather(self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int) -> Pending:
        return self._gather(group, outputs if group.rank == group.index(dst) else None, input, agreed=True)

    def gatherv(self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, dst: int) -> Pending:
        return self._gather(group, outputs if group.rank == group.index(dst) else None, input, agreed=False)

    def _gather(
        self, group: Group, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, agreed: bool
    ) -> Pending:
        input = apart(input, outputs or ())
        places, sizes = _memory(outputs, group.size)
        handle = self._groups[group].gather(input.data_ptr(), input.nbytes, places, sizes, agreed, (outputs, input))
        return self._pending(handle, group)

    def scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Pending:
        return self._scatter(group, output, inputs, group.index(src), agreed=True)

    def scatterv(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Pending:
        return self._scatter(group, output, inputs, group.index(src), agreed=False)

    def _scatter(
        self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, agreed: bool
    ) -> Pending:
        inputs = None if group.rank != root or inputs is None else [apart(input, (output,)) for input in inputs]
        outputs: list[torch.Tensor | None] = [None] * group.size
        outputs[root] = output
        handle = self._groups[group].exchange(
            *_memory(inputs, group.size), *_memory(outputs, group.size), agreed, (output, inputs)
        )
        return self._pending(handle, group)

    def reduce_scatter_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
        return self._reduce_scatter_tensor(group, output, input, op)(group, output, input, op)

    def _reduce_scatter_tensor(
        self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str
    ) -> Callable[..., Pending]:
        scatter, peers, block, whole = self._groups[group].reduce_scatter, self._peers, output.nbytes, input.nbytes
        fixed = (block, *_REDUCTIONS[input.dtype, op])

        def reduce_scatter_tensor(group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
            source, target = input.data_ptr(), output.data_ptr()
            if source < target + block and target < source + whole:
                input = input.clone()
                source = input.data_ptr()
            handle = scatter(source, target, *fixed, (output, input))
            return DONE if handle is None else ShmPending(handle, peers, group.ranks)

        return reduce_scatter_tensor

    def reduce_scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Pending:
        inputs = [apart(input, (output,)) for input in inputs]
        reduction = _REDUCTIONS[output.dtype, op]
        handle = self._groups[group].reduce_scatter_list(
            *_memory(inputs, group.size), output.data_ptr(), *reduction, (output, inputs)
        )
        return self._pending(handle, group)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        args = (output, input, output_splits, input_splits)
        return self._all_to_all_single(group, *args)(group, *args)

    def _all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Callable[..., Pending]:
        if output_splits is not None or input_splits is not None:
            return self._all_to_all_split
        exchange, peers, size = self._groups[group].all_to_all, self._peers, input.nbytes
        block = size // group.size

        def all_to_all_single(
            group: Group, output: torch.Tensor, input: torch.Tensor, output_splits: None, input_splits: None
        ) -> Pending:
            source, target = input.data_ptr(), output.data_ptr()
            if source < target + size and target < source + size:
                input = input.clone()
                source = input.data_ptr()
            handle = exchange(source, target, block, (output, input))
            return DONE if handle is None else ShmPending(handle, peers, group.ranks)

        return all_to_all_single

    def _all_to_all_split(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        input = apart(input, (output,))
        handle = self._groups[group].exchange(
            *_cut(input, input_splits, group.size), *_cut(output, output_splits, group.size), False, (output, input)
        )
        return self._pending(handle, group)

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        inputs = [apart(input, outputs) for input in inputs]
        handle = self._groups[group].exchange(
            *_memory(inputs, group.size), *_memory(outputs, group.size), False, (outputs, inputs)
        )
        return self._pending(handle, group)

    def send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int) -> Pending:
        return self._send(group, tensor, dst, tag)(group, tensor, dst, tag)

    def recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int) -> Pending:
        return self._recv(group, tensor, src, tag)(group, tensor, src, tag)

    def _send(self, group: Group, tensor: torch.Tensor, dst: int, tag: int) -> Callable[..., Pending]:
        return self._message(self._messages.send, group, tensor)

    def _recv(self, group: Group, tensor: torch.Tensor, src: int | None, tag: int) -> Callable[..., Pending]:
        return self._message(self._messages.recv, group, tensor)

    def _message(self, start: Callable[..., Any], group: Group, tensor: torch.Tensor) -> Callable[..., Pending]:
        size, peers, ranks = tensor.nbytes, self._peers, self._ranks
        places: dict[int | None, int] = {rank: self._places[rank] for rank in group.ranks} | {None: -1}
        first_tag = message_tag(group, 0, _MAX_TAG)

        def message(group: Group, tensor: torch.Tensor, peer: int | None, tag: int) -> Pending:
            place = places.get(peer)
            if place is None or not 0 <= tag < MESSAGE_TAGS:  # which one it is, these say
                group.index(-1 if peer is None else peer)
                message_tag(group, tag, _MAX_TAG)
            handle = start(tensor.data_ptr(), size, place, first_tag + tag, tensor)
            return DONE if handle is None else ShmPending(handle, peers, ranks)

        return message

    def barrier(self, group: Group) -> Pending:
        handle = self._groups[group].barrier()
        return DONE if handle is None else ShmPending(handle, self._peers, group.ranks)


def _memory(tensors: Sequence[torch.Tensor | None] | None, size: int) -> tuple[list[int], list[int]]:
    """Return the address and the bytes of each tensor, zeros for none."""
    if tensors is None:
        return [0] * size, [0] * size
    return [0 if t is None else t.data_ptr() for t in tensors], [0 if t is None else t.nbytes for t in tensors]


def _cut(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> tuple[list[int], list[int]]:
    """Return the address and the bytes of each rank's part of `tensor`."""
    sizes = [count * tensor.element_size() for count in counts(tensor, splits, size)]
    starts = itertools.accumulate(sizes[:-1], initial=tensor.data_ptr())
    return list(starts), sizes
