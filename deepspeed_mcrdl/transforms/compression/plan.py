"""The planner: whether to compress a call, in how many partitions, carried by what; from measured costs alone.

Selective compression and partitioning of HiPress (SeCoPa, SOSP 2021, doi 10.1145/3477132.3483553): the cost of each
primitive is T(bytes) = A + B bytes, here with a floor, fitted to what was measured, and the choice is the least of all
predictions. HiPress itself found codecs on CPUs slower than none on fast links; then the plan is not to compress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

PARTITIONS = (1, 2, 4)
MARGIN = 0.95  # of the uncompressed time, that a compressed call must be predicted, then measured, to take at most


class Curve(NamedTuple):
    """Microseconds of something by its bytes: max(floor, fixed + per_byte bytes)."""

    floor: float
    fixed: float
    per_byte: float

    def __call__(self, nbytes: float) -> float:
        return max(self.floor, self.fixed + self.per_byte * nbytes)


def fit(points: Sequence[tuple[int, float]]) -> Curve:
    """Return the curve of (bytes, microseconds) with the least relative errors; its floor is the least measured."""
    sizes, us = (numpy.array(column, dtype=float) for column in zip(*points, strict=True))
    per_byte, fixed = numpy.polyfit(sizes, us, 1, w=1 / us)
    return Curve(float(us.min()), float(fixed), max(float(per_byte), 0.0))


@dataclass(frozen=True)
class Coding:
    """What a codec costs on the slowest rank, by the bytes of the tensor, and what it makes of them.

    Attributes:
        encode: of a tensor.
        decode: of its payload.
        merge: of its payload into a sum.
        payload: bytes of a payload by the bytes of the tensor, as (fixed, share).
        sized: whether the ranks exchange the sizes of payloads first.
    """

    encode: Curve
    decode: Curve
    merge: Curve
    payload: tuple[float, float]
    sized: bool


@dataclass(frozen=True)
class Carriage:
    """What a backend takes for the steps of a compressed call.

    Attributes:
        exchange: by the bytes that each rank sends to the others.
        gather: by the bytes that each rank then has.
        overlaps: whether it goes on while this rank encodes.
    """

    exchange: Curve
    gather: Curve
    overlaps: bool


class Plan(NamedTuple):
    """A decision.

    Attributes:
        compress: whether that is predicted to be faster.
        carrier: name of the backend that carries the best compressed call.
        partitions: pieces of the tensor in it, one after the other.
        us: predicted microseconds of it.
        plain_us: predicted microseconds without compression.
    """

    compress: bool
    carrier: str
    partitions: int
    us: float
    plain_us: float


def predicted(coding: Coding, carriage: Carriage, nbytes: int, ranks: int, reduces: bool, partitions: int) -> float:
    """Return the microseconds that a compressed call is predicted to take.

    Args:
        coding: of the codec.
        carriage: of the backend.
        nbytes: of the tensor.
        ranks: of the group.
        reduces: whether it is an all_reduce, rather than an all_to_all_single.
        partitions: pieces of the tensor; those of a backend that goes on by itself travel while others are encoded.
    """
    part = nbytes / partitions / ranks
    fixed, share = coding.payload
    payload = fixed + share * part
    others = ranks - 1
    code = others * coding.encode(part)
    send = carriage.exchange(others * payload) + (carriage.exchange(8 * ranks) if coding.sized else 0)
    if reduces:
        code += others * coding.merge(part) + coding.encode(part) + ranks * coding.decode(part)
        send += carriage.gather(ranks * payload) + (carriage.gather(8 * ranks) if coding.sized else 0)
    else:
        code += others * coding.decode(part)
    if carriage.overlaps:
        return partitions * max(code, send) + min(code, send)
    return partitions * (code + send)


def choose(
    coding: Coding, carriers: Mapping[str, Carriage], plain: Curve, nbytes: int, ranks: int, reduces: bool
) -> Plan:
    """Return the plan with the least predicted time; no compression unless it is faster by MARGIN."""
    choices: Iterable[tuple[float, int, str]] = (
        (predicted(coding, carriage, nbytes, ranks, reduces, partitions), partitions, name)
        for name, carriage in carriers.items()
        for partitions in (PARTITIONS if reduces else (1,))
    )
    us, partitions, name = min(choices)
    plain_us = plain(nbytes)
    return Plan(us < MARGIN * plain_us, name, partitions, us, plain_us)
