"""What online tuning learns, kept as a table that the next job starts from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_mcrdl.config import SizeRule, Tuning
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.messages import logger
from deepspeed_mcrdl.routing.online import Trial, Verdict
from deepspeed_mcrdl.routing.router import Key
from deepspeed_mcrdl.routing.shelf import Found, own_tables
from deepspeed_mcrdl.routing.table import Entry, Fingerprint, Lookup, Measurement, Table, today

_NEAR = 2.0  # times a measured size


@dataclass
class _Line:
    """What is known of one operation, class of dtypes, device and mesh: upper size limit in bits -> measurements."""

    by_bits: dict[int, tuple[str, list[Measurement]]] = field(default_factory=dict)
    unsized: str | None = None


class Memory:
    """The verdicts so far, and the table that they make with the one that the job started from.

    Args:
        tuning: the config's block.
        world_size: number of ranks.
        here: this machine and the backends in use.
        start: the table that the job started from.
    """

    def __init__(self, tuning: Tuning, world_size: int, here: Fingerprint, start: Found | None) -> None:
        self._path = Path(tuning.output) if tuning.output else own_tables() / f"online-{world_size}-ranks.json"
        self._fingerprint = here
        fits = start is not None and start.fits
        self._start = start.table if start is not None and fits else None
        self._lookup = Lookup(self._start) if self._start is not None else None
        self._lines: dict[tuple[str, str, str, Mesh], _Line] = {}

    def knows(self, key: Key) -> bool:
        """Return whether the table that the job started from was measured here for calls like `key`."""
        entry = None if self._lookup is None else self._lookup.entry(key.operation, key.dtype, key.device, key.mesh)
        if entry is None or entry.mesh != key.mesh:
            return False
        if key.bytes is None:
            return True
        return any(m.bytes / _NEAR <= key.bytes <= m.bytes * _NEAR or m.bytes == key.bytes == 0 for m in entry.measured)

    def note(self, trial: Trial, verdict: Verdict, counts: tuple[int, int]) -> None:
        """Say what a trial came to, and write the table."""
        medians = ", ".join(f"{name} {us:.0f} us" for name, us in sorted(verdict.medians_us.items()))
        settled, met = counts
        logger.info(
            "tuned %s on %s: %s (%s); %d of %d kinds of calls are settled",
            *(trial.kind, trial.group, verdict.backend, medians or "not measured", settled, met),
        )
        if not verdict.medians_us:
            return
        kind = trial.kind
        line = self._lines.setdefault((kind.operation, kind.dtype, kind.device, trial.group.mesh), _Line())
        if kind.bits is None:
            line.unsized = verdict.backend
        else:
            size = 2**kind.bits
            line.by_bits[kind.bits] = (
                verdict.backend,
                [
                    Measurement(bytes=size, backend=name, median_us=us, p10_us=us, p90_us=us, samples=trial.trials)
                    for name, us in verdict.medians_us.items()
                ],
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.table().write(self._path)
        except OSError as error:
            logger.warning("what online tuning has learned can't be kept: %s", error)

    def table(self) -> Table:
        """Return the table: what was learned, before what the job started from."""
        learned = [_entry(*line, known) for line, known in self._lines.items()]
        lines = {(e.operation, e.dtype, e.device, e.mesh) for e in learned}
        kept = self._start.entries if self._start is not None else ()
        older = [e for e in kept if (e.operation, e.dtype, e.device, e.mesh) not in lines]
        return Table(
            made=today(),
            how="online tuning",
            fingerprint=self._fingerprint,
            entries=(*learned, *older),
            buckets=self._start.buckets if self._start is not None else (),
            chunks=self._start.chunks if self._start is not None else (),
        )


def _entry(operation: str, dtype: str, device: str, mesh: Mesh, line: _Line) -> Entry:
    choices = sorted((bits, backend) for bits, (backend, _) in line.by_bits.items())
    steps = [
        SizeRule(max_bytes=2**bits, backend=backend)
        for (bits, backend), (_, following) in itertools.pairwise(choices)
        if backend != following
    ]
    last = choices[-1][1] if choices else line.unsized
    assert last is not None
    return Entry.model_validate(
        {
            "operation": operation,
            "dtype": dtype,
            "device": device,
            "mesh": mesh,
            "steps": [*steps, SizeRule(backend=last)],
            "unsized": line.unsized or last,
            "measured": [m for _, measured in line.by_bits.values() for m in measured],
        }
    )
