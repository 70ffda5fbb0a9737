"""What holds of all lanes, those of fused calls and those of calls in chunks."""

import time
from datetime import timedelta

import pytest
import torch

from deepspeed_mcrdl.errors import CallFailedError, CallTimeoutError
from tests.backends import BACKENDS
from tests.programs import use

# What carries calls in lanes: the config, and the elements of a call.
TRANSFORMS = {
    "fusion": ({}, 10),
    "chunk": ({"operations": ["all_reduce"], "max_bytes": 4096, "min_call_bytes": 0}, 10_000),
}
LANES = {"fusion": "fusion", "chunk": "chunks"}  # the runtime's attributes

transforms = pytest.mark.parametrize("transform", TRANSFORMS)
backends = pytest.mark.parametrize("backend", BACKENDS)


def _start(transform, backend):
    block, count = TRANSFORMS[transform]
    return use({"default": BACKENDS[0], "all_reduce": backend}, **{transform: block}), count


def _two_groups_in_two_orders(transform, backend):
    cdb, count = _start(transform, backend)
    groups = [cdb.new_group(range(2)) for _ in range(2)]
    tensors = [torch.ones(count), torch.ones(count + 2)]
    order = [0, 1] if cdb.get_rank() == 0 else [1, 0]
    works = {place: cdb.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order}
    for place in order:
        works[place].wait()
    assert all((tensor == 2).all() for tensor in tensors)
    for group in groups:
        cdb.destroy_process_group(group)


@transforms
@backends
def test_ranks_may_wait_for_groups_in_orders_of_their_own(ranks, transform, backend):
    ranks(2).run(_two_groups_in_two_orders, transform, backend, timeout_s=30)


def _left_with_calls(transform, backend):
    cdb, count = _start(transform, backend)
    runtime = cdb.runtime
    before = set(runtime._joined)
    for cycle in range(8):
        group = cdb.new_group(range(2))
        tensors = [torch.ones(count) for _ in range(5)]
        works = [cdb.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        if cycle % 2 == cdb.get_rank():
            works[-1].wait()
        cdb.destroy_process_group(group)
        works[0].wait()
        assert all((tensor == 2).all() for tensor in tensors)
    assert runtime._joined == before
    assert not getattr(runtime, LANES[transform])._lanes


@transforms
@backends
def test_a_group_may_be_left_before_its_calls_are_waited_for(ranks, transform, backend):
    ranks(2).run(_left_with_calls, transform, backend)


def _left_alone(transform):
    cdb, count = _start(transform, BACKENDS[0])
    group = cdb.new_group(range(2))
    error = None
    if cdb.get_rank() == 0:
        work = cdb.all_reduce(torch.ones(count), group=group, async_op=True)
    cdb.destroy_process_group(group)
    if cdb.get_rank() == 0:
        with pytest.raises(CallFailedError) as info:
            work.wait()
        error = str(info.value)
    cdb.barrier()
    return error


@transforms
def test_a_call_that_the_others_never_make_ends_with_its_group(ranks, transform):
    error = ranks(2).run(_left_alone, transform)[0]
    assert "all_reduce #1 on group" in error
    assert "was destroyed before the call was done" in error


def _late(transform, backend):
    cdb, count = _start(transform, backend)
    tensors = [torch.ones(count), torch.ones(count - 7)]
    errors = []
    if cdb.get_rank() == 1:
        time.sleep(2)
    works = [cdb.all_reduce(tensor, async_op=True) for tensor in tensors]
    if cdb.get_rank() == 0:
        with pytest.raises(CallTimeoutError) as info:
            works[1].wait(timedelta(seconds=0.6))
        errors.append(str(info.value))
    for work in works:
        work.wait()
    assert all((tensor == 2).all() for tensor in tensors)
    return errors


@transforms
@backends
def test_a_late_call_is_named_and_can_still_be_waited_for(ranks, transform, backend):
    (error,) = ranks(2).run(_late, transform, backend)[0]
    assert f"all_reduce #2 on group 'world' (ranks 0, 1) by {backend} was not done" in error
    assert "rank 1 did not arrive" in error
