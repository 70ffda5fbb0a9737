"""Tuning inside a running job: the first calls of each kind try the backends in turn, then the best one stays.

A kind of call is an operation on a group with a class of dtypes, a reduce operation and a size within a factor of two.
Which backend carries which of its calls follows from how many there were before and from a seed, so that all ranks of
the group take the same one. Times are what the caller spends in the call and in wait(), so that a backend which works
beside the script's own computation counts as fast as the script feels it. In a real job ranks come to a call at
different times, and most of a call can be waiting for the last one, whatever carries it. So of each call the least time
of all ranks counts: the last to come waits for nobody. With a root, where ranks may leave before others have come, it
is the greatest.

After the last trial each rank puts its times into the job's store, and a few calls later, at a call that all ranks
count alike, one of them says there what holds: the backend with the least median if it beats the usual choice by
MARGIN, or "later" if some rank has yet to come. Nobody waits for another rank's call: a collective here would block
asynchronous calls, and right programs could deadlock. For the same reason messages are not tried, as a rank can't
count what another one sends to "any".
"""

from __future__ import annotations

import json
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallTimeoutError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import OPERATIONS
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.routing.table import dtype_class, table_name
from deepspeed_mcrdl.safety import Progress

MARGIN = 1.05
_WARM_UP = 1
_LAG = 2  # calls between the last trial and the verdict
_PATIENCE_S = 0.05
_MOST_DELAYS = 8
_LATER = "later"


class Kind(NamedTuple):
    """A kind of call.

    Attributes:
        operation: its name in tables.
        dtype: class of dtypes.
        device: device type.
        op: reduce operation.
        bits: sizes of at most 2**bits bytes and more than half of that; None where sizes are unknown.
    """

    operation: str
    dtype: str
    device: str
    op: str | None
    bits: int | None

    @classmethod
    def of(cls, key: Key) -> Kind:
        """Return the kind of a routed key."""
        bits = None if key.bytes is None else max(key.bytes - 1, 0).bit_length()
        device = key.device or "cpu"
        return cls(table_name(key.operation), dtype_class(key.operation, key.dtype), device, key.op, bits)

    def __str__(self) -> str:
        size = "of unknown sizes" if self.bits is None else f"up to {2**self.bits} bytes"
        return " ".join(part for part in (self.operation, self.op, self.dtype, size) if part)


class Verdict(NamedTuple):
    """What a trial came to: the backend that stays, and each one's median in microseconds."""

    backend: str
    medians_us: dict[str, float]


class Trial:
    """The trials of one kind of call on one group.

    Args:
        kind: the kind.
        group: the group.
        candidates: the backends to try; the first is the usual choice.
        trials: timed calls of each.
        again_after: calls after which to try again; None: never.
        store: the job's store.
        progress: who waits.
        settled: called with the verdict.
    """

    def __init__(
        self,
        kind: Kind,
        group: Group,
        candidates: Sequence[str],
        trials: int,
        again_after: int | None,
        store: Store,
        progress: Progress,
        settled: Callable[[Trial, Verdict], None],
    ) -> None:
        self.kind, self.group, self.candidates, self.trials = kind, group, list(candidates), trials
        self.verdict: Verdict | None = None
        self._again_after = again_after
        self._store = store
        self._progress = progress
        self._settled = settled
        self._usual = self.candidates[0]
        self._epoch = -1
        self._lock = threading.Lock()
        self._begin()

    @property
    def over(self) -> bool:
        """Whether calls need not come here any more."""
        return self.verdict is not None and self._again_after is None

    def _begin(self) -> None:
        self._epoch += 1
        self._prefix = f"online/{self.group.number}/{'/'.join(map(str, self.kind))}/{self._epoch}"
        order = random.Random(self._prefix)
        self._schedule = list(self.candidates) * _WARM_UP
        for _ in range(self.trials):
            self._schedule += order.sample(self.candidates, len(self.candidates))
        self._us: dict[str, dict[int, float]] = {name: {} for name in self.candidates}
        self._calls = 0
        self._verdict_at = len(self._schedule) + _LAG
        self._delays = 0
        self.verdict = None

    def next(self) -> tuple[str, Callable[[float], None] | None]:
        """Return the backend of the next call, and where to report its seconds, None if they don't matter."""
        with self._lock:
            if self.verdict is not None and self._again_after is not None and self._calls >= self._again_after:
                self._usual = self.verdict.backend
                self._begin()
            place = self._calls
            self._calls += 1
            if self.verdict is not None:
                return self.verdict.backend, None
            if place < len(self._schedule):
                name = self._schedule[place]
                us = self._us[name]
                counts = place >= _WARM_UP * len(self.candidates)
                return name, (lambda seconds: us.__setitem__(place, seconds * 1e6)) if counts else None
            if place == len(self._schedule):
                self._tell()
            if place == self._verdict_at:
                self._hear(place)
            return self.verdict.backend if self.verdict else self._usual, None

    def _tell(self) -> None:
        self._store.set(
            f"{self._prefix}/{self.group.rank}", json.dumps({name: dict(us) for name, us in self._us.items()})
        )

    def _hear(self, place: int) -> None:
        """Learn what holds from whoever comes to this call first."""
        name = f"{self._prefix}/verdict/{self._delays}"
        if self._store.add(f"{name}/claimed", 1) == 1:
            keys = [f"{self._prefix}/{index}" for index in range(self.group.size)]
            here = self._progress.wait_until(lambda: self._store.check(keys), _PATIENCE_S)
            verdict = self._judge(keys) if here else None
            self._store.set(name, json.dumps(verdict or _LATER))
        if not self._progress.wait_until(lambda: self._store.check([name]), self._progress.timeout_s):
            raise CallTimeoutError(f"the choice for {self.kind} on {self.group} did not come: a rank has ended")
        told = json.loads(self._store.get(name))
        if told != _LATER:
            self._settle(Verdict(*told))
        elif self._delays < _MOST_DELAYS:
            self._delays += 1
            self._verdict_at = place + 2**self._delays
        else:
            self._settle(Verdict(self._usual, {}))

    def _judge(self, keys: Sequence[str]) -> Verdict:
        ranks = [json.loads(text) for text in self._store.multi_get(list(keys))]
        of_all = max if OPERATIONS[self.kind.operation].rooted else min
        medians = {}
        for name in self.candidates:
            places = set.intersection(*(set(rank[name]) for rank in ranks))  # timed on all ranks by now
            if places:
                medians[name] = statistics.median(of_all(rank[name][place] for rank in ranks) for place in places)
        best = min(medians, key=lambda name: medians[name], default=self._usual)
        usual = medians.get(self._usual)
        wins = usual is None or medians.get(best, usual) * MARGIN < usual
        return Verdict(best if wins else self._usual, medians)

    def _settle(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._calls = 0
        self._settled(self, verdict)


class Online:
    """The trials of this process.

    Args:
        router: says which backends can carry a call, and which one usually does.
        trials: timed calls of each backend.
        again_after: calls of a kind after which to try again; None: never.
        store: the job's store.
        progress: who waits.
        known: whether a table that fits this machine has a measured choice for a key.
        settled: called with each verdict.
    """

    def __init__(
        self,
        router: Router,
        trials: int,
        again_after: int | None,
        store: Store,
        progress: Progress,
        known: Callable[[Key], bool],
        settled: Callable[[Trial, Verdict], None],
    ) -> None:
        self._router = router
        self._trials, self._again_after = trials, again_after
        self._store, self._progress = store, progress
        self._known, self._settled = known, settled
        self._found: dict[tuple[Kind, Group], Trial] = {}

    def trial(self, key: Key, group: Group) -> Trial | None:
        """Return the trial that calls with `key` on `group` take part in; None if there is nothing to try."""
        if not key.operation.collective or group.size < 2 or self._router.pinned(key) is not None or self._known(key):
            return None
        kind = Kind.of(key)
        trial = self._found.get((kind, group))
        if trial is None:
            usual = self._router.decide(key).backend
            others = [name for name in self._router.able(key) if name != usual]
            if not others:
                return None
            trial = self._found[kind, group] = Trial(
                kind,
                group,
                [usual, *others],
                self._trials,
                self._again_after,
                self._store,
                self._progress,
                self._settled,
            )
        return trial

    def counts(self) -> tuple[int, int]:
        """Return how many kinds of calls are settled, and how many were met."""
        return sum(trial.verdict is not None for trial in self._found.values()), len(self._found)

    def forget(self, group: Group) -> None:
        """Forget the trials of a destroyed group."""
        self._found = {key: trial for key, trial in self._found.items() if key[1] is not group}
