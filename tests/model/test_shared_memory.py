"""The rounds of native/collectives.c, in every order of the ranks' steps.

The state is what the ranks share (slots, `where`, `written`, `done`) and how far each rank is. A rank's steps are those
that another rank can see one by one: begin to write a slot, end it, publish it, begin to read, end it, publish that. A
rank may take any slot that is free, while the code takes the first that it knows of. With `folds` a round has the step
between put and get that it has in ALL_FOLD, whose results are in a part of the slot of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

WRITING = -1  # in a slot: its writer is inside


@dataclass(frozen=True)
class Rank:
    """How far a rank is: rounds put, folded and got, and the step within the one that it is at."""

    put: int = 0
    folded: int = 0
    got: int = 0
    step: str = "idle"


@dataclass(frozen=True)
class State:
    """Slots and results hold the round that was written last, `where` by a round's place which slot it is in; one tuple
    a rank."""

    ranks: tuple[Rank, ...]
    slots: tuple[tuple[int, ...], ...]
    where: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    reduced: tuple[int, ...]
    done: tuple[int, ...]


class Wrong(Exception):
    """A rank has read what it must not."""


def _set(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _moves(state, me, rounds, ring, rule, folds):
    """Yield the states that the next steps of rank `me` lead to."""
    rank, others = state.ranks[me], [r for r in range(len(state.ranks)) if r != me]

    def after(changes, **shared):
        return replace(state, ranks=_set(state.ranks, me, replace(rank, **changes)), **shared)

    def check(parts, number):
        """The others' slots must be, and stay until the reading is over, what they are to be in this round."""
        for r in others:
            held = parts[r][state.where[r][number % ring]]
            if held != number:
                raise Wrong(f"rank {me} reads {held} of rank {r} in round {number}")

    def published(counters, number):
        return all(counters[r] >= number + 1 for r in others)

    if rank.step == "idle":
        room = rank.put < ring or min(state.done) >= rank.put - ring + 1 or rule == "no wait for readers"
        free = [slot for slot in range(ring) if state.slots[me][slot] < min(state.done) or rule.endswith("readers")]
        if rank.put < rounds and room:
            assert free, f"rank {me} has room and no free slot in {state}"
            for slot in free:
                slots = _set(state.slots, me, _set(state.slots[me], slot, WRITING))
                where = _set(state.where, me, _set(state.where[me], rank.put % ring, slot))
                yield after({"step": "writes"}, slots=slots, where=where)
        if folds and rank.folded < rank.put and published(state.written, rank.folded):
            yield after({"step": "folds"})
        there = published(state.reduced if folds and rule != "gets unreduced" else state.written, rank.got)
        if rank.got < (rank.folded if folds else rank.put) and (there or rule == "no wait for writers"):
            yield after({"step": "reads"})
    elif rank.step == "writes":
        if rule == "published too early" and state.written[me] == rank.put:
            yield after({}, written=_set(state.written, me, rank.put + 1))
        else:
            place = state.where[me][rank.put % ring]
            yield after({"step": "publishes"}, slots=_set(state.slots, me, _set(state.slots[me], place, rank.put)))
    elif rank.step == "publishes":
        yield after({"step": "idle", "put": rank.put + 1}, written=_set(state.written, me, rank.put + 1))
    elif rank.step == "folds":
        check(state.slots, rank.folded)
        place = state.where[me][rank.folded % ring]
        results = _set(state.results, me, _set(state.results[me], place, rank.folded))
        yield after({"step": "has folded"}, results=results)
    elif rank.step == "has folded":
        check(state.slots, rank.folded)
        yield after({"step": "idle", "folded": rank.folded + 1}, reduced=_set(state.reduced, me, rank.folded + 1))
    elif rank.step == "reads":
        check(state.results if folds else state.slots, rank.got)
        yield after({"step": "has read"})
    else:
        check(state.results if folds else state.slots, rank.got)
        yield after({"step": "idle", "got": rank.got + 1}, done=_set(state.done, me, rank.got + 1))


def explore(ranks, rounds, ring, rule="", folds=False):
    """Visit all states; return how many there are."""
    nowhere, nothing, zeros = ((0,) * ring,) * ranks, ((WRITING,) * ring,) * ranks, (0,) * ranks
    first = State((Rank(),) * ranks, nothing, nowhere, nothing, zeros, zeros, zeros)
    seen, left = {first}, [first]
    while left:
        state = left.pop()
        nexts = [after for me in range(ranks) for after in _moves(state, me, rounds, ring, rule, folds)]
        assert nexts or all(rank.got == rounds for rank in state.ranks), f"deadlock in {state}"
        new = [after for after in set(nexts) if after not in seen]
        seen.update(new)
        left.extend(new)
    return len(seen)


@pytest.mark.parametrize(("ranks", "rounds", "ring"), [(2, 4, 1), (2, 5, 2), (2, 4, 3), (3, 3, 1), (3, 3, 2)])
def test_nobody_reads_what_is_being_written_and_all_come_to_the_end(ranks, rounds, ring):
    assert explore(ranks, rounds, ring) > 50


@pytest.mark.parametrize(("ranks", "rounds", "ring"), [(2, 3, 1), (2, 4, 2), (3, 2, 1)])
def test_the_step_between_put_and_get(ranks, rounds, ring):
    assert explore(ranks, rounds, ring, folds=True) > 50


RULES = ["no wait for readers", "takes the slots of readers", "no wait for writers", "published too early"]


@pytest.mark.parametrize(("rule", "folds"), [*((rule, False) for rule in RULES), ("gets unreduced", True)])
def test_each_wait_is_needed(rule, folds):
    with pytest.raises(Wrong):
        explore(2, 4, 2, rule, folds)
