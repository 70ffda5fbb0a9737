"""Compressed all_reduce and all_to_all_single, composed of a codec's primitives and two operations of any backend.

all_reduce: each rank owns a partition of the tensor. It sends the other ranks the payloads of theirs
(all_to_all_single), merges what it receives of its own into a float32 sum in the order of the ranks, its own part as
it is, and sends the payload of that sum to all (all_gather). Every rank decodes the same payloads, so all get the same
bits. An average is divided before the second encoding. This is the composition of CaSync (HiPress, SOSP 2021, doi
10.1145/3477132.3483553) with as many owners as ranks.

all_to_all_single with even blocks: each block is encoded, exchanged and decoded; a rank's block for itself is copied.

Where the size of a payload depends on the values, the ranks exchange the sizes before.

Each half has a communicator of its own, a part of the group with all its ranks; `Turns` keeps the order of the calls
on it, since its steps start when those before them are done.

Tensors of a GPU are encoded and decoded there, on streams beside the caller's (`Aside`): what error feedback has kept
of a piece belongs to the stream of that piece, and is in order on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.backends.base import Backend, joined
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.streams import Device, device_of
from deepspeed_mcrdl.transforms.compression.codec import Codec
from deepspeed_mcrdl.transforms.compression.feedback import ErrorFeedback
from deepspeed_mcrdl.transforms.compression.identity import Identities
from deepspeed_mcrdl.transforms.steps import Fit, Step, chain
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import Pending, Together

# What a backend must have to carry a compressed call.
STEPS = (ops.ALL_TO_ALL_SINGLE, ops.ALL_GATHER_INTO_TENSOR, ops.ALL_GATHER)
_SEED = 2718

Payloads = Callable[[], Sequence[torch.Tensor]]


class Half(NamedTuple):
    """One half of the calls of a group: the way to the owners, or from them.

    Attributes:
        part: the group's ranks, with communicators of their own.
        generator: for stochastic codecs; encodings of one half come in the order of the calls.
    """

    part: Group
    generator: torch.Generator


class Halves(NamedTuple):
    """What carries the calls of a group on tensors of one device.

    Attributes:
        to_owners: the way to the owners.
        from_owners: the way from them.
        device: what orders work there; None for host memory.
        streams: by what error feedback calls a piece: the stream that what it has kept belongs to.
    """

    to_owners: Half
    from_owners: Half
    device: Device | None
    streams: dict[Hashable, Any]

    def aside(self, key: Hashable | None, reads: bool) -> Aside | None:
        """Return where the work of a call or a piece goes beside the caller's.

        It never waits for a later call's producers: without feedback (None) each has a stream of its own, with it
        a piece has that of the same piece in the step before.
        """
        if self.device is None:
            return None
        if key is None:
            return Aside(self.device, None, reads)
        if key not in self.streams:
            self.streams[key] = self.device.side_stream()
        return Aside(self.device, self.streams[key], reads)


class Compressed:
    """Carries calls with one codec.

    Attributes:
        codec: what encodes.
        identities: what knows the steps of the training and the places of calls in them.

    Args:
        codec: what encodes.
        groups: the groups of the job.
        join: makes the communicator of a part of a group in a backend, once; every member calls it.
        fit: gives a backend's method for a step.
        feedback_bytes: the most that residuals may take.
        device_of: tensor -> the device it is on, None for host memory.
    """

    def __init__(
        self,
        codec: Codec,
        groups: Groups,
        join: Callable[[Backend, Group], None],
        fit: Fit,
        feedback_bytes: int,
        device_of: Callable[[torch.Tensor], Device | None] = device_of,
    ) -> None:
        self.codec = codec
        self._groups = groups
        self._join = join
        self._fit = fit
        self._turns = Turns()
        self._device_of = device_of
        self._halves: dict[tuple[Group, torch.device], Halves] = {}
        self._feedback: dict[Group, ErrorFeedback] = {}
        self._feedback_bytes = feedback_bytes
        self.identities = Identities(self._forget)

    def close(self) -> None:
        """Hear of no more training steps."""
        self.identities.close()

    def leave(self, group: Group) -> tuple[Group, ...]:
        """Forget a group; return its parts, whose communicators are to be freed."""
        self._feedback.pop(group, None)
        self.identities.discard(group)
        left = [self._halves.pop(key) for key in tuple(self._halves) if key[0] is group]
        return tuple(half.part for halves in left for half in (halves.to_owners, halves.from_owners))

    def reset(self) -> None:
        """Forget what error feedback has kept."""
        for feedback in self._feedback.values():
            feedback.reset()

    def prepare(self, backend: Backend, group: Group, device: torch.device) -> Halves:
        """Make the communicators of a group's calls by `backend`; every member calls it at the same place.

        Args:
            backend: what carries their steps.
            group: the group.
            device: where the tensors are.
        """
        known = group, device
        if known not in self._halves:
            self._halves[known] = self._new_halves(group, device)
        halves = self._halves[known]
        for half in (halves.to_owners, halves.from_owners):
            self._join(backend, half.part)
        return halves

    def _new_halves(self, group: Group, device: torch.device) -> Halves:
        name = f"{group.name}/{group.number} compressed {self.codec.name}"
        to_owners, from_owners = (
            Half(self._groups.make(group.ranks, f"{name} {way}"), self._generator(group, device))
            for way in ("to owners", "from owners")
        )
        there = self._device_of(torch.empty(0, device=device))
        if there is not None:
            with there.on(there.side_stream()):  # what a codec keeps on a device is copied there now, not in a call
                payload = self.codec.encode(torch.zeros(1, device=device), self._generator(group, device))
                self.codec.decode(payload, 1, torch.float32)
        return Halves(to_owners, from_owners, there, {})

    @staticmethod
    def _generator(group: Group, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(_SEED + group.ranks[group.rank])

    def all_reduce(self, backend: Backend, partitions: int, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        """Start an all_reduce.

        Args:
            backend: what carries its steps, for which `prepare` was called.
            partitions: pieces that are encoded and sent one after the other, while those before are under way.
            group: the group.
            tensor: a contiguous float tensor.
            op: "sum" or "avg".

        Raises:
            CallError: if the codec needs error feedback and the tensor has no identity (identity.py).
        """
        if not self.codec.wants_feedback:
            return self.reduce(backend, partitions, group, tensor, op, 0, None)
        place = self.identities.place(group, (ops.ALL_REDUCE.name, op, tensor.numel(), tensor.dtype, tensor.device))
        if group not in self._feedback:
            self._feedback[group] = self.new_feedback()
        return self.reduce(backend, partitions, group, tensor, op, place, self._feedback[group])

    def reduce(
        self,
        backend: Backend,
        partitions: int,
        group: Group,
        tensor: torch.Tensor,
        op: str,
        place: int,
        feedback: ErrorFeedback | None,
    ) -> Pending:
        """Start an all_reduce, as `all_reduce` does, of which `feedback` keeps under `place` what is lost."""
        flat = tensor.detach().view(-1)
        pieces = torch.split(flat, -(-flat.numel() // partitions))
        calls = [
            self._reduce(backend, group, piece, op, (place, number), feedback) for number, piece in enumerate(pieces)
        ]
        return calls[0] if len(calls) == 1 else Together(calls)

    def new_feedback(self) -> ErrorFeedback:
        """Return room for what the codec loses."""
        return ErrorFeedback(self.codec, self._feedback_bytes)

    def _reduce(
        self,
        backend: Backend,
        group: Group,
        flat: torch.Tensor,
        op: str,
        key: tuple[int, int],
        feedback: ErrorFeedback | None,
    ) -> Pending:
        halves = self._halves[group, flat.device]
        to_owners, from_owners = halves.to_owners, halves.from_owners
        parts = partitioned(flat, group.size)
        own = parts[group.rank]

        def encode(half: Half, part: int | str, values: torch.Tensor) -> torch.Tensor:
            if feedback is None or not values.numel():
                return self.codec.encode(values, half.generator)
            return feedback.encode((*key, part), values, half.generator)

        def others() -> list[torch.Tensor]:
            return [
                own.new_empty(0, dtype=torch.uint8) if place == group.rank else encode(to_owners, place, part)
                for place, part in enumerate(parts)
            ]

        def total() -> torch.Tensor:
            sums = own.new_zeros(own.numel(), dtype=torch.float32)
            for place, payload in enumerate(received()):
                if place == group.rank:
                    sums.add_(own)
                elif self.codec.lossless:
                    sums.add_(self.codec.decode(payload, own.numel(), own.dtype))
                else:
                    self.codec.merge(sums, payload)
            if op == "avg":
                sums.div_(group.size)
            if self.codec.lossless:
                sums = sums.to(own.dtype)
            return encode(from_owners, "sum", sums)

        def finish() -> None:
            for part, payload in zip(parts, gathered(), strict=True):
                self.codec.decode_into(payload, part)

        sizes = self._sizes(parts)
        first, received = self._to_each(backend, to_owners.part, others, sizes, flat.device)
        second, gathered = self._to_all(backend, from_owners.part, total, sizes, flat.device)
        aside = halves.aside(None if feedback is None else key, reads=sizes is None)
        return chain(self._turns, self._fit, [*first, *second], finish, aside)

    def all_to_all_single(
        self, backend: Backend, group: Group, output: torch.Tensor, input: torch.Tensor, *splits: None
    ) -> Pending:
        """Start an all_to_all_single of even blocks of contiguous float tensors."""
        halves = self._halves[group, input.device]
        to_owners = halves.to_owners
        blocks = partitioned(input.detach().view(-1), group.size)
        targets = partitioned(output.detach().view(-1), group.size)
        own = blocks[group.rank].clone()

        def others() -> list[torch.Tensor]:
            return [
                own.new_empty(0, dtype=torch.uint8)
                if place == group.rank
                else self.codec.encode(block, to_owners.generator)
                for place, block in enumerate(blocks)
            ]

        def finish() -> None:
            for place, (target, payload) in enumerate(zip(targets, received(), strict=True)):
                if place == group.rank:
                    target.copy_(own)
                else:
                    self.codec.decode_into(payload, target)

        sizes = self._sizes(blocks)
        steps, received = self._to_each(backend, to_owners.part, others, sizes, input.device)
        return chain(self._turns, self._fit, steps, finish, halves.aside(None, reads=sizes is None))

    def _forget(self, group: Group) -> None:
        if group in self._feedback:
            self._feedback[group].reset()

    def _sizes(self, parts: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the size of each part's payload, None if it depends on the values."""
        sizes = [self.codec.payload_bytes(part.numel()) if part.numel() else 0 for part in parts]
        known = [size for size in sizes if size is not None]
        return known if len(known) == len(sizes) else None

    def _to_each(
        self, backend: Backend, part: Group, payloads: Payloads, sizes: Sequence[int] | None, device: torch.device
    ) -> tuple[list[Step], Payloads]:
        """Return the steps that send each rank its payload, and what then gives those received.

        Args:
            backend: what carries them.
            part: the ranks.
            payloads: called once, when the first step starts; this rank's own is empty.
            sizes: the size of the payload for each rank, whoever sends it, if it is known.
            device: where payloads are.
        """
        arrived: list[torch.Tensor] = []
        encoded: list[torch.Tensor] = []
        heard = torch.empty(part.size, dtype=torch.int64, device=taken_from(backend, device))

        def step(operation: Operation, arguments: Callable[[], tuple[Any, ...]]) -> Step:
            return Step(backend, part, operation, arguments)

        def told() -> tuple[Any, ...]:
            encoded.extend(payloads())
            return heard, heard.new_tensor([payload.numel() for payload in encoded]), None, None

        def data() -> tuple[Any, ...]:
            if sizes is None:
                counts = heard.tolist()
            else:
                encoded.extend(payloads())
                counts = [0 if place == part.rank else sizes[part.rank] for place in range(part.size)]
            whole = torch.empty(sum(counts), dtype=torch.uint8, device=device)
            arrived.extend(torch.split(whole, counts))
            arguments = whole, joined(encoded), counts, [payload.numel() for payload in encoded]
            encoded.clear()
            return arguments

        steps = [step(ops.ALL_TO_ALL_SINGLE, data)]
        if sizes is None:
            steps.insert(0, step(ops.ALL_TO_ALL_SINGLE, told))
        return steps, lambda: arrived

    def _to_all(
        self,
        backend: Backend,
        part: Group,
        payload: Callable[[], torch.Tensor],
        sizes: Sequence[int] | None,
        device: torch.device,
    ) -> tuple[list[Step], Payloads]:
        """Return the steps that send this rank's payload to all, and what then gives those of all ranks."""
        arrived: list[torch.Tensor] = []
        encoded: list[torch.Tensor] = []
        heard = torch.empty(part.size, dtype=torch.int64, device=taken_from(backend, device))
        even = sizes is not None and min(sizes) == max(sizes)

        def told() -> tuple[Any, ...]:
            encoded.append(payload())
            return heard, heard.new_tensor([encoded[0].numel()])

        def data() -> tuple[Any, ...]:
            own = encoded.pop() if encoded else payload()
            counts = heard.tolist() if sizes is None else list(sizes)
            if even:
                whole = torch.empty(sum(counts), dtype=torch.uint8, device=device)
                arrived.extend(torch.split(whole, counts))
                return whole, own
            arrived.extend(torch.empty(count, dtype=torch.uint8, device=device) for count in counts)
            return list(arrived), own

        steps = [Step(backend, part, ops.ALL_GATHER_INTO_TENSOR if even else ops.ALL_GATHER, data)]
        if sizes is None:
            steps.insert(0, Step(backend, part, ops.ALL_GATHER_INTO_TENSOR, told))
        return steps, lambda: arrived


def taken_from(backend: Backend, device: torch.device) -> torch.device:
    """Return where numbers for the host are to be, that a backend carries for calls on tensors of `device`."""
    return torch.device("cpu") if "cpu" in backend.devices else device


def partitioned(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return a tensor's partition of each rank: equal ones, of which the last may be shorter or empty."""
    size = -(-flat.numel() // ranks)
    return [flat[min(rank * size, flat.numel()) : min((rank + 1) * size, flat.numel())] for rank in range(ranks)]
