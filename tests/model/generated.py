"""Every small program, and every mixture of backends that can carry it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.model.model import Carrier, Carriers, Operation, Program, Rule, Statement, Statements, System, issue, wait


def schedules(operations: tuple[Operation, ...]) -> Iterator[Statements]:
    """All orders in which a rank can issue and wait for each of `operations`.

    Operations of one channel are issued in the order given; all else is free. Of issues that follow each other directly
    only the order given is taken: issuing blocks nobody, so the others are no different.
    """

    def extend(done: Statements, unissued: tuple[Operation, ...]) -> Iterator[Statements]:
        if len(done) == 2 * len(operations):
            yield done
        last = operations.index(done[-1].operation) if done and done[-1].action == "issue" else -1
        for i, operation in enumerate(operations):
            if operation not in unissued:
                if Statement("wait", operation) not in done:
                    yield from extend(done + wait(operation), unissued)
            elif i > last and operation is next(o for o in unissued if o.channel == operation.channel):
                yield from extend(done + issue(operation), tuple(o for o in unissued if o is not operation))

    return extend((), operations)


def programs(world_size: int, operations: tuple[Operation, ...]) -> Iterator[Program]:
    """All programs in which every rank issues and waits for each operation that it takes part in."""
    own = [tuple(operation for operation in operations if rank in operation.ranks) for rank in range(world_size)]
    return itertools.product(*map(schedules, own))


def legal(program: Program) -> bool:
    """Whether the program is free of deadlock on one backend that has progress of its own."""
    operations = {statement.operation for statements in program for statement in statements}
    return System(program, dict.fromkeys(operations, Carrier.GLOO), Rule.NONE).explore(reduced=True).deadlock is None


def mixtures(operations: tuple[Operation, ...]) -> Iterator[Carriers]:
    """All choices of carriers that use both gloo and MPI; what has a source can also be eager."""
    plain = Carrier.GLOO, Carrier.MPI
    for chosen in itertools.product(*(plain if o.source is None else Carrier for o in operations)):
        if Carrier.GLOO in chosen and len(set(chosen)) > 1:
            yield dict(zip(operations, chosen, strict=True))
