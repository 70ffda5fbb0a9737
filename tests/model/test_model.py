"""No program that is right on one backend deadlocks on a mixture: all small programs, in all orders of their ranks.

docs/DEADLOCK.md has the argument; these are the cases it was tried on. The numbers that tests compare with are written
down so that an enumeration that loses programs does not pass unseen.
"""

import itertools
from collections import Counter

import pytest

from tests.model.generated import legal, mixtures, programs, schedules
from tests.model.model import Carrier, Operation, Rule, System, call, issue, wait

PAIR = (0, 1)
ALL = (0, 1, 2)
ALL_REDUCE = Operation("all_reduce#0", PAIR)
BROADCAST = Operation("broadcast#1", PAIR, source=0)
GATHER = Operation("all_gather#2", PAIR)
SCATTER = Operation("reduce_scatter#3", PAIR)
THERE = Operation("message 0->1", (0, 1), source=0, message=True)
BACK = Operation("message 1->0", (1, 0), source=1, message=True)
LARGE = (THERE._replace(source=None), BACK._replace(source=None))  # never eager
COLLECTIVE_RING = tuple(Operation(f"all_reduce of {a},{b}", (a, b)) for a, b in [(0, 1), (1, 2), (0, 2)])
MESSAGE_RING = tuple(Operation(f"message {a}->{b}", (a, b), a, message=True) for a, b in [(0, 1), (1, 2), (2, 0)])
OF_ALL = (Operation("all_reduce#0 of all", ALL), Operation("broadcast#1 of all", ALL, source=0))

# Rank 1 waits in MPI for rank 0, which waits in gloo for rank 1.
KILLER = (issue(ALL_REDUCE) + call(BROADCAST) + wait(ALL_REDUCE), call(ALL_REDUCE) + call(BROADCAST))
# The receiver takes the message only after the collective.
LATE_RECEIVER = (issue(THERE) + call(ALL_REDUCE) + wait(THERE), call(ALL_REDUCE) + call(THERE))


def test_the_killer_deadlocks_where_a_wait_on_gloo_drives_nothing():
    carriers = {ALL_REDUCE: Carrier.MPI, BROADCAST: Carrier.GLOO}
    deadlock = System(KILLER, carriers, Rule.NONE).explore().deadlock
    assert deadlock is not None
    assert deadlock.waits == ("rank 0 waits for broadcast#1 on gloo", "rank 1 waits for all_reduce#0 on mpi")
    assert "rank 1 does step 1 of all_reduce#0 on mpi" in deadlock.moves
    assert "rank 0 does step 1 of all_reduce#0 on mpi" not in deadlock.moves
    for rule in Rule.DRIVE, Rule.FINISH_FIRST:
        assert System(KILLER, carriers, rule).explore().deadlock is None


def test_finishing_mpi_first_deadlocks_where_a_message_is_taken_after_a_collective():
    carriers = {THERE: Carrier.MPI, ALL_REDUCE: Carrier.GLOO}
    deadlock = System(LATE_RECEIVER, carriers, Rule.FINISH_FIRST).explore().deadlock
    assert deadlock is not None
    assert deadlock.waits == (
        "rank 0 finishes its MPI operations before it issues all_reduce#0 on gloo",
        "rank 1 waits for all_reduce#0 on gloo",
    )
    assert System(LATE_RECEIVER, carriers, Rule.DRIVE).explore().deadlock is None
    eager = carriers | {THERE: Carrier.EAGER}
    assert System(LATE_RECEIVER, eager, Rule.FINISH_FIRST).explore().deadlock is None, "its sender needs no receiver"


@pytest.mark.parametrize("rule", Rule)
def test_a_wrong_program_deadlocks_whatever_the_rule_and_the_carriers(rule):
    program = (call(ALL_REDUCE) + call(GATHER), call(GATHER) + call(ALL_REDUCE))
    assert not legal(program)
    for first, second in itertools.product(Carrier, repeat=2):
        deadlock = System(program, {ALL_REDUCE: first, GATHER: second}, rule).explore().deadlock
        assert deadlock is not None
        assert deadlock.waits == (
            f"rank 0 waits for all_reduce#0 on {first.value}",
            f"rank 1 waits for all_gather#2 on {second.value}",
        )


@pytest.mark.parametrize(
    ("world_size", "operations", "deadlocks"),
    [
        pytest.param(2, (ALL_REDUCE, BROADCAST), (0, 2, 0), id="two collectives"),
        pytest.param(2, (THERE, ALL_REDUCE), (0, 4, 6), id="a message and a collective"),
        pytest.param(2, (THERE, BACK), (0, 4, 6), id="messages that cross"),
        pytest.param(3, OF_ALL, (0, 12, 0), id="two collectives of three ranks"),
        pytest.param(3, COLLECTIVE_RING, (0, 12, 12), id="a ring of sub-groups"),
    ],
)
def test_in_all_interleavings_only_the_other_rules_deadlock(world_size, operations, deadlocks):
    found: Counter[Rule] = Counter()
    for program in programs(world_size, operations):
        right = legal(program)
        for carriers, rule in itertools.product(mixtures(operations), Rule):
            system = System(program, carriers, rule)
            deadlock = system.explore().deadlock
            assert (deadlock is None) == (system.explore(reduced=True).deadlock is None), "the reduction is at fault"
            found[rule] += right and deadlock is not None
    assert (found[Rule.DRIVE], found[Rule.NONE], found[Rule.FINISH_FIRST]) == deadlocks


def test_the_known_programs_are_among_those_generated():
    assert KILLER in programs(2, (ALL_REDUCE, BROADCAST))
    assert LATE_RECEIVER in programs(2, (THERE, ALL_REDUCE))


def _explore(candidates, operations):
    """Assert that no legal program deadlocks on any mixture; return the numbers of programs, systems and states."""
    right, systems, states = 0, 0, 0
    for program in filter(legal, candidates):
        right += 1
        for carriers in mixtures(operations):
            explored = System(program, carriers, Rule.DRIVE).explore(reduced=True)
            assert explored.deadlock is None, str(explored.deadlock)
            systems += 1
            states += explored.states
    return right, systems, states


@pytest.mark.parametrize(
    ("world_size", "operations", "numbers"),
    [
        pytest.param(2, (ALL_REDUCE, BROADCAST, GATHER), (225, 2025, 230_242), id="three collectives"),
        pytest.param(2, (ALL_REDUCE, GATHER, THERE), (515, 4635, 464_562), id="two collectives and a message"),
        pytest.param(2, (ALL_REDUCE, *LARGE), (906, 5436, 554_790), id="a collective and large messages that cross"),
        pytest.param(3, MESSAGE_RING, (62, 1116, 163_419), id="a ring of messages"),
        pytest.param(
            3, (*COLLECTIVE_RING[:2], OF_ALL[0]), (438, 2628, 705_454), id="sub-groups that overlap, and all ranks"
        ),
    ],
)
def test_no_mixture_deadlocks(world_size, operations, numbers):
    assert _explore(programs(world_size, operations), operations) == numbers


def test_four_collectives_beside_a_rank_that_blocks_in_each():
    operations = (ALL_REDUCE, BROADCAST, GATHER, SCATTER)
    blocking = sum(map(call, operations), ())
    assert _explore(((blocking, other) for other in schedules(operations)), operations) == (105, 2205, 253_295)
