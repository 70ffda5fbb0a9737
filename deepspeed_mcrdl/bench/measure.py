"""Times calls the right way, once for all benchmarks and the tuner.

Before each call the ranks are aligned by a barrier; a call's time is that of the slowest rank; every result is checked
after its call, outside the time. What is compared is called in turns, in an order drawn anew for each round. Short
calls come in blocks of a few, whose first is not counted: it pays for what another has left of caches and threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench.cases import Case, Issue
from deepspeed_mcrdl.bench.wire import sent_bytes
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.runtime import Runtime

WARM_UP = 3
LEAST_ROUNDS = 9
MOST_ROUNDS = 2000
_BLOCK_US = 500.0
_LONGEST_BLOCK = 8
_ALIKE = 8.0  # carriers within this factor are called in blocks of one length, so that they compare
_COPY_BYTES = (2**14, 2**17, 2**20, 2**26)
_COPY_REPEATS = 20
_COUNTED_CALLS = 5  # for bytes on the wire


@dataclass(frozen=True)
class Samples:
    """Microseconds of the slowest rank, by carrier.

    Attributes:
        us: of every call.
        rounds_us: the median of each round; those of one round, taken close together, stand at one place.
        wrong: how many results were wrong on any rank.
    """

    us: dict[str, list[float]]
    rounds_us: dict[str, list[float]]
    wrong: dict[str, int]


class Meter:
    """Measures on one group; all its members make the same calls of it.

    Args:
        runtime: the runtime of the job.
        group: the group.
        seed: of the order within rounds; the same on all members.
    """

    def __init__(self, runtime: Runtime, group: Group, seed: int = 0) -> None:
        self._runtime = runtime
        self._group = group
        self._order = random.Random(seed)
        # The most preferred backend that reaches all aligns and sums up, whatever is measured.
        self._service = reaching(runtime, group)[0]

    def measure(self, case: Case, carriers: Mapping[str, Issue], seconds: float, rounds: int | None = None) -> Samples:
        """Call `case` by each carrier in turns.

        Args:
            case: what to call.
            carriers: how, by name.
            seconds: about how long to go on.
            rounds: how often instead.
        """
        warm, round_s = self._rounds(case, carriers, WARM_UP, dict.fromkeys(carriers, 1))
        least = {name: min(us) for name, us in warm.us.items()}  # the first ones make connections
        fastest = min(least.values())
        block = min(max(int(_BLOCK_US / fastest), 1), _LONGEST_BLOCK)
        calls = {name: block if us < _ALIKE * fastest else 1 for name, us in least.items()}
        if rounds is None:
            round_s += sum(least[name] * calls[name] for name in carriers if calls[name] > 1) / 1e6
            rounds = min(max(int(seconds / round_s) - WARM_UP, LEAST_ROUNDS), MOST_ROUNDS)
        samples, _ = self._rounds(case, carriers, rounds, calls)
        return samples

    def _rounds(
        self, case: Case, carriers: Mapping[str, Issue], rounds: int, calls: Mapping[str, int]
    ) -> tuple[Samples, float]:
        """Return the samples of some rounds of so many counted calls, and the seconds that a round took with all."""
        names = list(carriers)
        took: dict[str, list[float]] = {name: [] for name in names}
        wrong = dict.fromkeys(names, 0)
        began = time.perf_counter()
        for _ in range(rounds):
            self._order.shuffle(names)
            for name in names:
                block = calls[name] + (calls[name] > 1)
                for place in range(block):
                    case.prepare()
                    self.align()
                    start = time.perf_counter()
                    case.run(carriers[name])
                    elapsed = time.perf_counter() - start
                    if place or block == 1:
                        took[name].append(elapsed * 1e6)
                    wrong[name] += not case.right()
        own = [value for name in carriers for value in took[name]]
        counts = [float(wrong[name]) for name in carriers]
        slowest = iter(self.worst([*own, *counts, (time.perf_counter() - began) / rounds]))
        us = {name: [next(slowest) for _ in took[name]] for name in carriers}
        faults = {name: int(next(slowest)) for name in carriers}
        by_round = {name: numpy.median(numpy.reshape(us[name], (rounds, -1)), axis=1).tolist() for name in carriers}
        return Samples(us, by_round, faults), next(slowest)

    def align(self) -> None:
        """Return when all members are here, at nearly the same time."""
        self._runtime.issue(ops.BARRIER, self._group.torch_group, (), backend=self._service)

    def worst(self, values: list[float]) -> list[float]:
        """Return the largest of every member's `values`, place by place."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self._runtime.issue(ops.ALL_REDUCE, self._group.torch_group, (tensor, "max"), backend=self._service)
        result: list[float] = tensor.tolist()
        return result

    def sent(self, case: Case, issue: Issue) -> int:
        """Return the bytes that a host sends for one call, the largest of all hosts."""
        case.prepare()
        self.align()
        before = sent_bytes()
        for _ in range(_COUNTED_CALLS):
            case.run(issue)
        self.align()
        return int(self.worst([(sent_bytes() - before) / _COUNTED_CALLS])[0])

    def overlap(self, case: Case, issue: Issue, seconds: float) -> dict[str, float]:
        """Measure `case` asynchronously beside a matrix product that takes about as long.

        Returns:
            Medians in microseconds: issue_us (until the call returns), wait_us (in wait, with nothing between),
            compute_us (the product alone), both_us (issue, product, wait); and overlap, the hidden part of the shorter
            of communication and computation (1: all of it).
        """
        self._phases(case, issue, lambda: None, 0)  # routes and connections
        alone = self._phases(case, issue, lambda: None, seconds / 2)
        product = _product(max(alone["issue_us"] + alone["wait_us"], 20.0))
        both = self._phases(case, issue, product, seconds / 2)
        communication = alone["issue_us"] + alone["wait_us"]
        total = both["issue_us"] + both["compute_us"] + both["wait_us"]
        compute = self.worst([_median_us(product)])[0]
        hidden = (communication + compute - total) / min(communication, compute)
        return {
            "issue_us": alone["issue_us"],
            "wait_us": alone["wait_us"],
            "compute_us": compute,
            "both_us": total,
            "overlap": hidden,
        }

    def _phases(self, case: Case, issue: Issue, compute: Callable[[], object], seconds: float) -> dict[str, float]:
        phases: dict[str, list[float]] = {"issue_us": [], "compute_us": [], "wait_us": []}
        rounds = 0
        goes_on = True
        began = time.perf_counter()
        while goes_on:
            case.prepare()
            self.align()
            times = [time.perf_counter()]
            handles = case.start(issue)
            times.append(time.perf_counter())
            compute()
            times.append(time.perf_counter())
            for handle in handles:
                handle.wait()
            times.append(time.perf_counter())
            for phase, start, end in zip(phases, times, times[1:], strict=False):
                phases[phase].append((end - start) * 1e6)
            rounds += 1
            goes_on = rounds < LEAST_ROUNDS or self.worst([time.perf_counter() - began])[0] < seconds
        medians = self.worst([float(numpy.median(values)) for values in phases.values()])
        return dict(zip(phases, medians, strict=True))


def reaching(runtime: Runtime, group: Group) -> list[str]:
    """Return the backends that reach all members of a group, in order of preference."""
    return [name for name, backend in runtime.backends.items() if backend.misfit(group.mesh) is None]


def copy_peak_GBps() -> float:
    """Return the fastest rate at which this process copies memory, from sizes that fit its caches to those that don't.

    No communication can have a higher bus bandwidth on CPU tensors: a call that seems to has returned before it was
    done.
    """
    best = 0.0
    for size in _COPY_BYTES:
        source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        for _ in range(_COPY_REPEATS):
            start = time.perf_counter()
            target.copy_(source)
            best = max(best, size / (time.perf_counter() - start) / 1e9)
    return best


def _product(us: float) -> Callable[[], object]:
    """Return a matrix product that takes about `us` microseconds."""
    side = 16
    while True:
        left = torch.ones(side, side)
        product = _multiply(left)
        if _median_us(product) >= us or side >= 2048:
            return product
        side = int(side * 1.26) + 1  # twice the work


def _multiply(left: torch.Tensor) -> Callable[[], object]:
    result = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=result)


def _median_us(function: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    return float(numpy.median(times))
