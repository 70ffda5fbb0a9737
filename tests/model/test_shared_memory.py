"""The rounds of native/collectives.c, in every order of the ranks' steps.

The state is what the ranks share (slots, `where`, `written`, `done`) and how far each rank is. A rank's steps are those
that another rank can see one by one: begin to write a slot, end it, publish it, begin to read, end it, publish that. A
rank may take any slot that is free, while the code takes the first that it knows of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

WRITING = -1  # in a slot: its writer is inside


@dataclass(frozen=True)
class Rank:
    """How far a rank is: rounds put and got, and the step within the one that it is at."""

    put: int = 0
    got: int = 0
    step: str = "idle"


@dataclass(frozen=True)
class State:
    """Slots hold the round that was written last, `where` by a round's place which slot it is in; one tuple a rank."""

    ranks: tuple[Rank, ...]
    slots: tuple[tuple[int, ...], ...]
    where: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    done: tuple[int, ...]


class Wrong(Exception):
    """A rank has read what it must not."""


def _set(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _moves(state, me, rounds, ring, rule):
    """Yield the states that the next steps of rank `me` lead to."""
    rank, others = state.ranks[me], [r for r in range(len(state.ranks)) if r != me]
    place = rank.put % ring

    def after(new, **changes):
        return replace(state, ranks=_set(state.ranks, me, new), **changes)

    def held(r):
        return state.slots[r][state.where[r][rank.got % ring]]

    if rank.step == "idle":
        room = rank.put < ring or min(state.done) >= rank.put - ring + 1 or rule == "no wait for readers"
        free = [slot for slot in range(ring) if state.slots[me][slot] < min(state.done) or rule.endswith("readers")]
        if rank.put < rounds and room:
            assert free, f"rank {me} has room and no free slot in {state}"
            for slot in free:
                slots = _set(state.slots, me, _set(state.slots[me], slot, WRITING))
                where = _set(state.where, me, _set(state.where[me], place, slot))
                yield after(Rank(rank.put, rank.got, "writes"), slots=slots, where=where)
        there = all(state.written[r] >= rank.got + 1 for r in others) or rule == "no wait for writers"
        if rank.got < rank.put and there:
            yield after(Rank(rank.put, rank.got, "reads"))
    elif rank.step == "writes":
        written = state.written
        if rule == "published too early":
            written = _set(written, me, rank.put + 1)
        slots = _set(state.slots, me, _set(state.slots[me], state.where[me][place], rank.put))
        if rule == "published too early" and state.written[me] == rank.put:
            yield after(rank, written=written)
        else:
            yield after(Rank(rank.put, rank.got, "publishes"), slots=slots)
    elif rank.step == "publishes":
        yield after(Rank(rank.put + 1, rank.got), written=_set(state.written, me, rank.put + 1))
    elif rank.step == "reads":
        for r in others:
            if held(r) != rank.got:
                raise Wrong(f"rank {me} reads {held(r)} of rank {r} in round {rank.got}")
        yield after(Rank(rank.put, rank.got, "has read"))
    else:
        # The slots must have stayed what they were until the reading was over.
        for r in others:
            if held(r) != rank.got:
                raise Wrong(f"rank {r} writes what rank {me} reads in round {rank.got}")
        yield after(Rank(rank.put, rank.got + 1), done=_set(state.done, me, rank.got + 1))


def explore(ranks, rounds, ring, rule=""):
    """Visit all states; return how many there are."""
    nowhere = ((0,) * ring,) * ranks
    first = State((Rank(),) * ranks, ((WRITING,) * ring,) * ranks, nowhere, (0,) * ranks, (0,) * ranks)
    seen, left = {first}, [first]
    while left:
        state = left.pop()
        nexts = [after for me in range(ranks) for after in _moves(state, me, rounds, ring, rule)]
        assert nexts or all(rank.got == rounds for rank in state.ranks), f"deadlock in {state}"
        new = [after for after in set(nexts) if after not in seen]
        seen.update(new)
        left.extend(new)
    return len(seen)


@pytest.mark.parametrize(("ranks", "rounds", "ring"), [(2, 4, 1), (2, 5, 2), (2, 4, 3), (3, 3, 1), (3, 3, 2)])
def test_nobody_reads_what_is_being_written_and_all_come_to_the_end(ranks, rounds, ring):
    assert explore(ranks, rounds, ring) > 50


@pytest.mark.parametrize(
    "rule", ["no wait for readers", "takes the slots of readers", "no wait for writers", "published too early"]
)
def test_each_wait_is_needed(rule):
    with pytest.raises(Wrong):
        explore(2, 4, 2, rule)
