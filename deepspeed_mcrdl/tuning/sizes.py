"""What a sweep says of sizes: how large the buckets of fused calls and the chunks of large ones are to be, if at all.

Measured on the world, beside the same calls unfused and whole, in turns. A size is taken only on evidence
(evidence.py). A chunk's also where it makes an all-to-all beside the all_reduce faster, and the all_reduce itself
not slower by more than a little: this is what chunks are for where they can't overlap.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench.carriers import DIRECT, carrier
from deepspeed_mcrdl.bench.cases import Issue, make_case
from deepspeed_mcrdl.bench.chunk import InChunks, ways
from deepspeed_mcrdl.bench.measure import Meter
from deepspeed_mcrdl.config import FusionBlock
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import OPERATIONS, Operation
from deepspeed_mcrdl.routing.table import Bucket, Chunk
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.transforms.fusion import Fusion
from deepspeed_mcrdl.tuning import evidence
from deepspeed_mcrdl.work import Work

_FUSION = "fusion"
_CALLS, _CALL_BYTES = 128, 2**12  # of fused calls, as gradients of biases and norms are
_BUCKETS = (2**16, 2**18, 2**20)
_WHOLE_BYTES, _SMALL_BYTES = 2**22, 2**16
_CHUNKS = (2**18, 2**20)
_WARM_UP, _ROUNDS = 1, 9
_MOST_LOSS = 0.95  # of its speed that an all_reduce may come to for an all-to-all's sake
_APART = 0  # in the place of a size


def what(runtime: Runtime) -> Iterator[tuple[str, str]]:
    """Yield (operation, or "fusion", and backend) of all that there is to measure, the same on all ranks."""
    for operation in (ops.ALL_REDUCE.name, _FUSION, ops.ALL_TO_ALL_SINGLE.name):
        for name in ways(runtime):
            yield operation, name


def measure(runtime: Runtime, operation: str, name: str) -> Bucket | Chunk | None:
    """Return what the table is to say, None if it can't be measured. Every rank calls this."""
    meter = Meter(runtime, runtime.groups.world)
    if operation == _FUSION:
        return _bucket(runtime, meter, name)
    return _chunk(runtime, meter, name, operation)


def _bucket(runtime: Runtime, meter: Meter, name: str) -> Bucket | None:
    way, world = runtime.ways[name], runtime.groups.world
    fusions = {size: Fusion(FusionBlock(max_bytes=size), None, runtime.groups, runtime.progress) for size in _BUCKETS}
    try:
        if not fusions[_BUCKETS[0]].able(way, world):
            return None
        carriers = {_APART: carrier(DIRECT + name, runtime, world)}
        for size, fusion in fusions.items():
            runtime.join(way, fusion.group_of(way, world))
            carriers[size] = _fused(runtime, fusion, name, world)
        tensors = [torch.empty(_CALL_BYTES // 4) for _ in range(_CALLS)]
        samples = _in_turns(meter, carriers, lambda issue: _many(meter, issue, tensors))
    finally:
        for fusion in fusions.values():
            fusion.close()
            for own in fusion.leave(world):
                way.leave(own)
    best, gain = _best(samples)
    return Bucket(backend=name, mesh=world.mesh, max_bytes=best, gain=gain)


def _fused(runtime: Runtime, fusion: Fusion, name: str, group: Group) -> Issue:
    method = fusion.method(runtime.ways[name], ops.ALL_REDUCE, group)

    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        return Work(method(group, *args), Call(operation, group, name, 0), runtime.progress)

    return issue


def _many(meter: Meter, issue: Issue, tensors: Sequence[torch.Tensor]) -> float:
    for tensor in tensors:
        tensor.fill_(1)
    meter.align()
    start = time.perf_counter()
    for work in [issue(ops.ALL_REDUCE, (tensor, "max"), True) for tensor in tensors]:
        work.wait()
    return time.perf_counter() - start


def _chunk(runtime: Runtime, meter: Meter, name: str, operation: str) -> Chunk | None:
    way, world = runtime.ways[name], runtime.groups.world
    reduces = operation == ops.ALL_REDUCE.name
    if way.lacks(OPERATIONS[operation], torch.float32, "cpu", "sum" if reduces else None):
        return None
    cut = {size: InChunks(name, runtime, world, size) for size in _CHUNKS}
    try:
        case = make_case(operation, world, _WHOLE_BYTES)
        carriers = {_APART: carrier(DIRECT + name, runtime, world)} | {size: one.issue for size, one in cut.items()}

        def alone(issue: Issue) -> float:
            meter.align()
            start = time.perf_counter()
            case.run(issue)
            return time.perf_counter() - start

        samples = _in_turns(meter, carriers, alone)
        size, gain = _best(samples)
        if size is not None or not reduces:
            return Chunk(operation=operation, backend=name, mesh=world.mesh, max_bytes=size, gain=gain)
        first = make_case(ops.ALL_TO_ALL_SINGLE.name, world, _SMALL_BYTES)

        def beside(issue: Issue) -> float:
            meter.align()
            works = case.start(issue)
            start = time.perf_counter()
            first.run(issue)
            took = time.perf_counter() - start
            for work in works:
                work.wait()
            return took

        dear = [size for size in _CHUNKS if _gain(samples, size) < _MOST_LOSS]
        cheap = {size: issue for size, issue in carriers.items() if size not in dear}
        best = _best(_in_turns(meter, cheap, beside))[0] if len(cheap) > 1 else None
        gain = gain if best is None else _gain(samples, best)
        return Chunk(operation=operation, backend=name, mesh=world.mesh, max_bytes=best, gain=gain)
    finally:
        for one in cut.values():
            one.close()


def _in_turns(meter: Meter, carriers: Mapping[int, Issue], took: Any) -> dict[int, list[float]]:
    order = random.Random(0)
    samples: dict[int, list[float]] = {size: [] for size in carriers}
    for _ in range(_WARM_UP + _ROUNDS):
        for size in order.sample(list(carriers), len(carriers)):
            samples[size].append(took(carriers[size]))
    return {size: meter.worst(own[_WARM_UP:]) for size, own in samples.items()}


def _best(samples: Mapping[int, list[float]]) -> tuple[int | None, float]:
    """Return the size of the least median and how many times as fast as without it is; None: that is not certain."""
    best = min((size for size in samples if size != _APART), key=lambda size: float(numpy.median(samples[size])))
    return best if evidence.faster(samples[best], samples[_APART]) else None, _gain(samples, best)


def _gain(samples: Mapping[int, list[float]], size: int) -> float:
    return round(float(numpy.median(samples[_APART]) / numpy.median(samples[size])), 3)
