"""What a choice needs: a difference that is larger than the noise.

The test: samples of two backends are taken in turns, so that each round gives a pair; one is faster if the median of
the pairs' ratios is above 1 by more than a margin with confidence. The confidence comes from a bootstrap of blocks of
neighbouring rounds, since noise on a machine lasts longer than a call. Without evidence the smaller size's choice is
kept, at the smallest size the preferred backend, so that tables don't flip-flop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy

from deepspeed_mcrdl.config import SizeRule

MARGIN = 1.02  # a smaller gain is not worth a change
CONFIDENCE = 0.975
_BLOCK = 8
_RESAMPLES = 400
_SEED = 20230308

Samples = Mapping[str, Sequence[float]]


def faster(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether `one` is faster than `other` by more than the noise; both are in the order they were taken."""
    low, _ = gain(one, other)
    return low > MARGIN


def gain(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return between which factors `one` is faster than `other` (below 1: slower), with the confidence on each side."""
    length = min(len(one), len(other))
    ratios = numpy.log(numpy.asarray(other[:length])) - numpy.log(numpy.asarray(one[:length]))
    blocks = -(-length // _BLOCK)
    padded = numpy.full(blocks * _BLOCK, numpy.nan)
    padded[:length] = ratios
    by_block = padded.reshape(blocks, _BLOCK)
    drawn = numpy.random.default_rng(_SEED).integers(0, blocks, (_RESAMPLES, blocks))
    medians = numpy.nanmedian(by_block[drawn].reshape(_RESAMPLES, -1), axis=1)
    low, high = numpy.quantile(medians, [1 - CONFIDENCE, CONFIDENCE])
    return math.exp(low), math.exp(high)


def choose(by_size: Mapping[int, Samples], preferred: Sequence[str]) -> dict[int, str]:
    """Return size -> backend.

    Args:
        by_size: size in bytes -> backend -> samples.
        preferred: all backends, the most preferred first.
    """
    chosen: dict[int, str] = {}
    incumbent = ""
    for size in sorted(by_size):
        samples = by_size[size]
        if incumbent not in samples:
            incumbent = next(name for name in preferred if name in samples)
        best = min(samples, key=lambda name: float(numpy.median(samples[name])))
        if best != incumbent and faster(samples[best], samples[incumbent]):
            incumbent = best
        chosen[size] = incumbent
    return chosen


def unsettled(samples: Samples, chosen: str) -> bool:
    """Return whether more samples could change a choice: another backend may be faster by more than the margin."""
    return any(gain(samples[name], samples[chosen])[1] > MARGIN for name in samples if name != chosen)


def steps(by_size: Mapping[int, Samples], chosen: Mapping[int, str]) -> tuple[SizeRule, ...]:
    """Return the size list of choices; a limit lies where the two backends' medians, lines in log-log, cross."""
    sizes = sorted(chosen)
    rules: list[SizeRule] = []
    for small, large in itertools.pairwise(sizes):
        if chosen[small] != chosen[large]:
            limit = _crossing(by_size, small, large, chosen[small], chosen[large])
            rules.append(SizeRule(max_bytes=limit, backend=chosen[small]))
    return (*rules, SizeRule(backend=chosen[sizes[-1]]))


def _crossing(by_size: Mapping[int, Samples], small: int, large: int, first: str, second: str) -> int:
    ends = []
    for size in (small, large):
        samples = by_size[size]
        if first not in samples or second not in samples:
            return small
        ends.append(math.log(float(numpy.median(samples[second])) / float(numpy.median(samples[first]))))
    ahead, behind = ends
    if ahead <= 0:  # kept for want of evidence only
        return small
    part = ahead / (ahead - behind) if behind < 0 else 0.5
    return int(max(small, 1) * (large / max(small, 1)) ** part)


def unsized(by_size: Mapping[int, Samples], chosen: Mapping[int, str]) -> str:
    """Return the backend for calls of unknown size: of those that have all sizes the one of least geometric mean."""
    everywhere = set.intersection(*(set(samples) for samples in by_size.values()))
    if not everywhere:
        return chosen[max(chosen)]

    def mean(name: str) -> float:
        return float(numpy.mean([math.log(float(numpy.median(samples[name]))) for samples in by_size.values()]))

    common = [name for name in dict.fromkeys(chosen.values()) if name in everywhere]
    return min(common or sorted(everywhere), key=mean)
