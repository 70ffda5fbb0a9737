"""An explicit-state model of ranks that mix backends: which programs deadlock under which rule for waiting.

A *program* is what each rank runs: it issues operations, which never blocks, and waits for them. A *carrier* says what
an operation needs in order to progress, and a *rule* what a rank drives while it waits. `System` is a program with its
carriers under a rule; `System.explore` visits every state that any order of the ranks' and backends' moves can reach.

A state is a row of counters: how far each rank is in its program, and how many of its steps each operation has done on
each of its ranks. Every move adds one to one counter. So a system has finitely many states and no run goes on for ever:
either all ranks end, or the run stops in a deadlock.

Operations are told apart by identity: that the ranks of a call agree on its carrier and meet in the same operation is
taken as given. Nor does the model know threads, receives from any rank, or errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Carrier(Enum):
    """What an operation needs in order to progress on a rank that takes part."""

    GLOO = "gloo"  # all its ranks have issued it; threads then do it, wherever the host is
    MPI = "mpi"  # rendezvous: all have issued it, then two steps by the host: the handshake, and the data
    EAGER = "mpi (eager)"  # small: done for its source when issued; the others need only a step of their own host


class Rule(Enum):
    """What a rank drives while it waits. In a wait on MPI it always drives all MPI operations: so does MPI itself."""

    DRIVE = "drive"  # any wait drives all host-driven operations: what the plugin does
    NONE = "none"  # a wait on gloo drives nothing
    FINISH_FIRST = "finish-first"  # before it issues or waits on gloo, a rank finishes its MPI operations


class Operation(NamedTuple):
    """A collective, or a message from its first rank to its second.

    Attributes:
        name: what traces call it.
        ranks: the ranks that take part.
        source: the rank whose part is done at once if the operation is eager: a message's sender, a broadcast's root.
        message: whether it is a message.
    """

    name: str
    ranks: tuple[int, ...]
    source: int | None = None
    message: bool = False

    @property
    def channel(self) -> tuple[int, ...]:
        """Where operations are issued in the same order on all ranks: a group, or from one rank to another."""
        return int(self.message), *self.ranks


class Statement(NamedTuple):
    """One statement of a rank's program: "issue" or "wait", and the operation."""

    action: str
    operation: Operation


Statements = tuple[Statement, ...]
Program = tuple[Statements, ...]
Carriers = dict[Operation, Carrier]


def issue(operation: Operation) -> Statements:
    """Start without blocking; both ends of a message do so."""
    return (Statement("issue", operation),)


def wait(operation: Operation) -> Statements:
    """Block until the operation is done on this rank."""
    return (Statement("wait", operation),)


def call(operation: Operation) -> Statements:
    """A blocking call is a start and a wait."""
    return issue(operation) + wait(operation)


class Deadlock(NamedTuple):
    """A state in which nothing can move, although some rank has not ended.

    Attributes:
        moves: how it came about, a line a move.
        waits: what each rank does there, a line a rank.
    """

    moves: tuple[str, ...]
    waits: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(("deadlock:", *self.waits, "after:", *self.moves))


class Exploration(NamedTuple):
    """The first deadlock found, if any, and how many states were visited."""

    deadlock: Deadlock | None
    states: int


State = int  # a field for each counter, so that one subtraction compares all of them
Guard = tuple[tuple[int, int], ...]  # what must hold for a move: counters, and the least values they must have

_BITS = 6  # of a field: five for the counter, and one above them that shows whether a subtraction has borrowed
_VALUE = 31
_BORROW = 32
_EVERYWHERE = (1 << _VALUE + 1) - 1  # all points of a rank, as bits


def _fields(values: Iterable[tuple[int, int]]) -> State:
    return sum(value << _BITS * counter for counter, value in values)


class _Point(NamedTuple):
    """Where a rank can be: in its own code before a statement, inside a blocking call, or at its end.

    Attributes:
        does: what the rank does here.
        to: the operation that it does it to.
        drives: whether the rank makes steps of host-driven operations here.
        leaves: what must hold for it to go on.
    """

    does: str
    to: Operation | None = None
    drives: bool = False
    leaves: Guard = ()


class _Counter(NamedTuple):
    """What adds one to a counter.

    Attributes:
        one: what a move adds to the state.
        shift: where in the state the counter is.
        needs: for each value of the counter the least values that all counters must have.
        host: where in the state it is that says at which point the counter's rank is.
        moving: the points, as bits, at which it can move.
        independent: the points, as bits, at which its move takes no other move away and no other takes it away, now or
            later. What a move needs stays true once it is, so only a rank that stops driving takes moves away: those
            of its own host-driven operations.
    """

    one: int
    shift: int
    needs: tuple[State, ...]
    host: int
    moving: int
    independent: int


class System:
    """A program whose operations are carried by `carriers`, on ranks that wait by `rule`."""

    def __init__(self, program: Program, carriers: Carriers, rule: Rule) -> None:
        self._carriers = carriers
        self._rule = rule
        self._parts = [(operation, rank) for operation in carriers for rank in operation.ranks]
        self._index = {part: counter for counter, part in enumerate(self._parts, len(program))}
        self._issued: dict[tuple[Operation, int], int] = {}
        self._points = [self._rank(rank, statements) for rank, statements in enumerate(program)]
        self._counters: list[_Counter] = []
        driving = [sum(point.drives << at for at, point in enumerate(points)) for points in self._points]
        for rank, points in enumerate(self._points):
            self._count([point.leaves for point in points[:-1]], rank, _EVERYWHERE, _EVERYWHERE & ~driving[rank])
        for operation, rank in self._parts:
            threads = carriers[operation] is Carrier.GLOO
            moving, independent = (_EVERYWHERE, _EVERYWHERE) if threads else (driving[rank], 0)
            self._count(self._steps(operation, rank), rank, moving, independent)

    def _count(self, guards: list[Guard], rank: int, moving: int, independent: int) -> None:
        if len(guards) > _VALUE:
            raise ValueError("the program is too long for a counter")
        shift = _BITS * len(self._counters)
        needs = (*map(_fields, guards), _BORROW)  # more than any counter has: from its last value none goes on
        self._counters.append(_Counter(1 << shift, shift, needs, _BITS * rank, moving, independent))

    def _rank(self, rank: int, statements: Statements) -> list[_Point]:
        """Lay out a rank's program as the points it goes through, one after the other."""
        points: list[_Point] = []
        finished: Guard = ()
        for action, operation in statements:
            on_gloo = self._carriers[operation] is Carrier.GLOO
            done = ((self._index[operation, rank], self._last(operation, rank)),)
            verb = "waits for" if action == "wait" else "issues"
            points.append(_Point(f"is in its own code before it {verb}", operation))
            if on_gloo and self._rule is Rule.FINISH_FIRST and finished:
                points.append(_Point(f"finishes its MPI operations before it {verb}", operation, True, finished))
            if action == "wait":
                drives = not on_gloo or self._rule is Rule.DRIVE
                points.append(_Point(verb, operation, drives, done))
            else:
                self._issued[operation, rank] = len(points)
                finished += () if on_gloo else done
        return [*points, _Point("has ended")]

    def _last(self, operation: Operation, rank: int) -> int:
        """How many steps the operation takes on a rank."""
        if self._carriers[operation] is Carrier.EAGER:
            return int(operation.source != rank)
        return 2 if self._carriers[operation] is Carrier.MPI else 1

    def _steps(self, operation: Operation, rank: int) -> list[Guard]:
        """What must hold before each step of the operation on a rank."""
        needed = operation.ranks
        if self._carriers[operation] is Carrier.EAGER and operation.source is not None:
            needed = operation.source, rank
        issued = tuple((other, self._issued[operation, other]) for other in needed)
        handshakes = tuple((self._index[operation, other], 1) for other in operation.ranks)
        return [issued, handshakes][: self._last(operation, rank)]

    def explore(self, reduced: bool = False) -> Exploration:
        """Visit all reachable states, until one is a deadlock.

        Args:
            reduced: where an independent move is possible, try no other: it can come first in whatever order leads to a
                deadlock (partial-order reduction, with persistent sets of one move). It visits far fewer states.
        """
        borrows = _fields((counter, _BORROW) for counter in range(len(self._counters)))
        ends = _fields((rank, len(points) - 1) for rank, points in enumerate(self._points))
        ranks = (1 << _BITS * len(self._points)) - 1
        reached: dict[State, tuple[State, int] | None] = {0: None}
        unexplored = [0]
        while unexplored:
            state = unexplored.pop()
            moves = []
            for one, shift, needs, host, moving, independent in self._counters:
                at = 1 << (state >> host & _VALUE)
                if moving & at and ((state | borrows) - needs[state >> shift & _VALUE]) & borrows == borrows:
                    if reduced and independent & at:
                        moves = [one]
                        break
                    moves.append(one)
            if not moves and state & ranks != ends:
                return Exploration(self._deadlock(state, reached), len(reached))
            for one in moves:
                if state + one not in reached:
                    reached[state + one] = state, one
                    unexplored.append(state + one)
        return Exploration(None, len(reached))

    def _deadlock(self, state: State, reached: dict[State, tuple[State, int] | None]) -> Deadlock:
        waits = tuple(self._at(rank, state) for rank in range(len(self._points)))
        moves: list[str] = []
        came = reached[state]
        while came is not None:
            before, one = came
            counter = one.bit_length() // _BITS
            if counter < len(self._points):
                moves.append(self._at(counter, before + one))
            else:
                operation, rank = self._parts[counter - len(self._points)]
                step = (before + one) >> _BITS * counter & _VALUE
                moves.append(f"rank {rank} does step {step} of {self._text(operation)}")
            came = reached[before]
        return Deadlock(tuple(reversed(moves)), waits)

    def _at(self, rank: int, state: State) -> str:
        point = self._points[rank][state >> _BITS * rank & _VALUE]
        return f"rank {rank} {point.does}" + (f" {self._text(point.to)}" if point.to else "")

    def _text(self, operation: Operation) -> str:
        return f"{operation.name} on {self._carriers[operation].value}"
