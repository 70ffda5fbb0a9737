"""Calls made of steps, each of which starts when the one before it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.transforms.turns import Turn, Turns
from deepspeed_mcrdl.work import Pending

# (backend, operation, group, arguments) -> the backend's method for them, with what it needs before and after.
Fit = Callable[[Backend, Operation, Group, tuple[Any, ...]], Callable[..., Pending]]


class Step(NamedTuple):
    """One step of a call: an operation on a part of its group; `arguments` is called when it starts."""

    backend: Backend
    group: Group
    operation: Operation
    arguments: Callable[[], tuple[Any, ...]]


def chain(
    turns: Turns,
    fit: Fit,
    steps: Sequence[Step],
    finish: Callable[[], object] | None = None,
    aside: Aside | None = None,
) -> Pending:
    """Return a call in steps.

    The lane of a step is its backend's communicator of its group: there the steps of all calls start in the order of
    the calls, so that its ranks see one order, however long the steps before took on each.

    Args:
        turns: where its steps take turns with those of other calls.
        fit: gives the method of a step.
        steps: the steps.
        finish: called once when all are done.
        aside: for tensors of a device: where the arguments of steps and `finish` work.
    """
    taken: list[Turn] = []
    for step in steps:
        before = taken[-1] if taken else None
        start = partial(_start, fit, step)
        if aside is None:
            taken.append(turns.take(step[:2], start, _at_once if before is None else before.poll))
        else:
            taken.append(turns.take(step[:2], partial(aside.run, start, before), partial(aside.ready, before)))
    if aside is None:
        return Chain(taken, finish)
    return aside.then(taken[-1], finish or _nothing, steps)


class Chain(Pending):
    """A call in steps, then what makes its result of the last one's.

    Args:
        steps: the steps, each of which waits for the one before it.
        finish: called once when all are done.
    """

    host_driven = True

    def __init__(self, steps: Sequence[Turn], finish: Callable[[], object] | None) -> None:
        self._steps = steps
        self._finish = finish

    def poll(self) -> bool:
        # The others are polled by those that wait for them, so that no two threads do it at once.
        if not self._steps[-1].poll():
            self.yields_s = next(
                step.yields_s for step in reversed(self._steps) if step.started or step is self._steps[0]
            )
            return False
        if self._finish is not None:
            self._finish()
        return True

    def block(self, limit_s: float) -> None:
        self._steps[-1].block(limit_s)


def _at_once() -> bool:
    return True


def _nothing() -> None:
    pass


def _start(fit: Fit, step: Step) -> Pending:
    arguments = step.arguments()
    return fit(step.backend, step.operation, step.group, arguments)(step.group, *arguments)
