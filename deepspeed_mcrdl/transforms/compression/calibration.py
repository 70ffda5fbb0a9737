"""What a codec, the backends and whole calls cost here, measured in the running job; the same on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.routing.router import Key
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.streams import device_of
from deepspeed_mcrdl.transforms.compression.codec import Codec
from deepspeed_mcrdl.transforms.compression.compressed import Compressed, taken_from
from deepspeed_mcrdl.transforms.compression.plan import Carriage, Coding, Curve, fit
from deepspeed_mcrdl.transforms.steps import Fit
from deepspeed_mcrdl.work import Pending

SIZES = (2**14, 2**17, 2**20, 2**22)  # bytes
REPEATS = 3
CONFIRMATION_US = 1e6  # of the runs of a confirmation after the first one, about


class Figures(NamedTuple):
    """All that a plan needs for one group, dtype and operation."""

    coding: Coding
    carriers: Mapping[str, Carriage]
    plain: Curve


def calibrate(
    compressed: Compressed,
    carriers: Mapping[str, Backend],
    plain: Backend,
    operation: Operation,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    method: Fit,
) -> Figures:
    """Measure; every member of the group calls it at the same place. A figure is that of the slowest rank.

    Args:
        compressed: the codec and the group's parts.
        carriers: the backends that could carry compressed calls, by name.
        plain: the backend that carries the call uncompressed.
        operation: all_reduce or all_to_all_single.
        group: its group.
        dtype: of the tensors.
        device: where the tensors are.
        progress: who waits.
        method: gives a backend's method.
    """

    def run(backend: Backend, what: Operation, on: Group, *args: Any) -> Pending:
        pending = method(backend, what, on, args)(on, *args)
        progress.finish(pending.poll, pending, Call(what, on, backend.name, group.calls))
        return pending

    def bytes_of(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    codec, others = compressed.codec, group.size - 1
    timed: list[list[float]] = []
    payload_bytes = [_time_coding(compressed, size, dtype, device, timed) for size in SIZES]
    driven = []
    for backend in carriers.values():
        halves = compressed.prepare(backend, group, device)
        counts = [0 if place == group.rank else 1 for place in range(group.size)]
        for size in SIZES:
            splits = [size // others * count for count in counts]
            out, into = bytes_of(sum(splits)), bytes_of(sum(splits))
            part = halves.to_owners.part
            timed.append(_times(lambda: run(backend, ops.ALL_TO_ALL_SINGLE, part, into, out, splits, splits), device))  # noqa: B023
            whole = bytes_of(size // group.size * group.size)
            own = bytes_of(size // group.size)
            again = halves.from_owners.part
            timed.append(_times(lambda: run(backend, ops.ALL_GATHER_INTO_TENSOR, again, whole, own), device))  # noqa: B023
        # One that is done at once on this rank may be under way on another.
        driven.append(float(run(backend, ops.ALL_GATHER_INTO_TENSOR, halves.from_owners.part, whole, own).host_driven))
    for size in SIZES:
        tensor = torch.zeros(size // dtype.itemsize // group.size * group.size, dtype=dtype, device=device)
        args = (tensor, "sum") if operation is ops.ALL_REDUCE else (torch.empty_like(tensor), tensor, None, None)
        timed.append(_times(lambda: run(plain, operation, group, *args), device))  # noqa: B023
    shared = [statistics.median(us) for us in timed] + payload_bytes + driven
    return _figures(largest(shared, plain, group, device, progress, method), codec, list(carriers))


def _figures(shared: list[float], codec: Codec, names: Sequence[str]) -> Figures:
    figures = iter(shared)
    rows = {size: [next(figures) for _ in range(3)] for size in SIZES}
    encode, decode, merge = (fit([(size, row[kind]) for size, row in rows.items()]) for kind in range(3))
    curves = []
    for _ in names:
        pairs = {size: (next(figures), next(figures)) for size in SIZES}
        curves.append([fit([(size, pair[kind]) for size, pair in pairs.items()]) for kind in range(2)])
    plain = fit([(size, next(figures)) for size in SIZES])
    payloads = [next(figures) for _ in SIZES]
    share = (payloads[-1] - payloads[0]) / (SIZES[-1] - SIZES[0])
    carriers = {
        name: Carriage(exchange, gather, overlaps=not next(figures))
        for name, (exchange, gather) in zip(names, curves, strict=True)
    }
    sized = codec.payload_bytes(1) is None
    return Figures(Coding(encode, decode, merge, (payloads[0] - share * SIZES[0], share), sized), carriers, plain)


def confirm(
    compressed: Compressed,
    carrier: Backend,
    partitions: int,
    plain: Backend,
    key: Key,
    group: Group,
    device: torch.device,
    progress: Progress,
    method: Fit,
) -> tuple[float, float]:
    """Return the microseconds of a call compressed and uncompressed, in turns; every member calls it at the same place.

    They are medians of the slowest rank. A call that is long is made once each way.

    Args:
        compressed: the codec and the group's parts, prepared for `carrier`.
        carrier: what carries the compressed call.
        partitions: its pieces.
        plain: what carries it uncompressed.
        key: of the call.
        group: its group.
        device: where its tensors are.
        progress: who waits.
        method: gives a backend's method.
    """
    assert key.dtype is not None
    assert key.bytes is not None
    values = torch.randn(key.bytes // key.dtype.itemsize, generator=torch.Generator().manual_seed(group.rank))
    values = values.to(device, key.dtype)
    tensor = torch.empty_like(values)
    feedback = compressed.new_feedback() if compressed.codec.wants_feedback else None
    reduces = key.operation is ops.ALL_REDUCE
    args = (tensor, key.op) if reduces else (torch.empty_like(values), tensor, None, None)

    def as_it_is() -> Pending:
        return method(plain, key.operation, group, args)(group, *args)

    def coded() -> Pending:
        if reduces:
            return compressed.reduce(carrier, partitions, group, tensor, str(key.op), 0, feedback)
        return compressed.all_to_all_single(carrier, group, *args[:2])

    def us(start: Callable[[], Pending]) -> float:
        tensor.copy_(values)
        settle(device)
        began = time.perf_counter()
        pending = start()
        progress.finish(pending.poll, pending, Call(key.operation, group, plain.name, group.calls))
        return (time.perf_counter() - began) * 1e6

    def both() -> list[float]:
        return largest([us(coded), us(as_it_is)], plain, group, device, progress, method)

    first = both()
    repeats = min(REPEATS, int(CONFIRMATION_US / sum(first)))  # the same on all ranks
    compressed_us, plain_us = zip(*([both() for _ in range(repeats)] or [first]), strict=True)
    return statistics.median(compressed_us), statistics.median(plain_us)


def largest(
    numbers: Sequence[float], by: Backend, group: Group, device: torch.device, progress: Progress, method: Fit
) -> list[float]:
    """Return of each number the largest that any member has; every member calls it at the same place."""
    told = torch.tensor(numbers, dtype=torch.float64, device=taken_from(by, device))
    pending = method(by, ops.ALL_REDUCE, group, (told, "max"))(group, told, "max")
    progress.finish(pending.poll, pending, Call(ops.ALL_REDUCE, group, by.name, group.calls))
    return [float(number) for number in told.tolist()]


def settle(device: torch.device) -> None:
    """Block until what this rank's stream has issued on `device` has happened."""
    there = device_of(torch.empty(0, device=device))
    if there is not None:
        there.synchronize(there.record())


def _time_coding(
    compressed: Compressed, size: int, dtype: torch.dtype, device: torch.device, timed: list[list[float]]
) -> int:
    """Add the times of encode, decode and merge of a tensor of `size` bytes; return the size of its payload."""
    generator = torch.Generator(device).manual_seed(size)
    codec = compressed.codec
    tensor = torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype)
    payload = codec.encode(tensor, generator)
    encode: Callable[[], object] = partial(codec.encode, tensor, generator)
    if codec.wants_feedback:
        encode = partial(compressed.new_feedback().encode, size, tensor, generator)
    out, sums = torch.empty_like(tensor), torch.zeros_like(tensor, dtype=dtype if codec.lossless else torch.float32)
    timed.append(_times(encode, device))
    timed.append(_times(lambda: codec.decode_into(payload, out), device))
    timed.append(_times(lambda: codec.merge(sums, payload), device))
    return payload.numel()


def _times(function: Callable[[], object], device: torch.device) -> list[float]:
    """Return the microseconds of some runs; the first, which pays for what is cold, is left out."""
    us = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function()
        settle(device)
        us.append((time.perf_counter() - start) * 1e6)
    return us[1:]
