"""Checked mode: calls that don't fit together are an error on every member; calls that do never are."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from deepspeed_mcrdl.checked import _ComparedMessage
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import CallTimeoutError, MismatchError
from deepspeed_mcrdl.work import Pending
from tests.programs import face, sub_group

LIMIT_S = 1.5


def checked(**config):
    face().restart(parse({"checked": True, "banner": False, "timeout_s": LIMIT_S, **config}))
    return face()


def _mistake(name):
    """Rank 1 makes another call than the others; return the error."""
    cdb = checked()
    rank, n = cdb.get_rank(), cdb.get_world_size()
    odd = rank == 1
    ops = torch.distributed.ReduceOp
    four = torch.ones(4)
    calls = {
        "operation": lambda: cdb.broadcast(four, 0) if odd else cdb.all_reduce(four),
        "shape": lambda: cdb.all_reduce(torch.ones(3, 2) if odd else torch.ones(2, 3)),
        "size": lambda: cdb.all_gather_into_tensor(torch.empty((2 if odd else 3) * n), torch.ones(2 if odd else 3)),
        "dtype": lambda: cdb.all_reduce(four.to(torch.int32) if odd else four),
        "reduce operation": lambda: cdb.all_reduce(four, ops.MAX if odd else ops.SUM),
        "root": lambda: cdb.broadcast(four, 1 if odd else 0),
        "splits": lambda: cdb.all_to_all_single(torch.empty(n), torch.ones(n), [1] * n, [2, 1, 0] if odd else [1] * n),
        "splits on one rank": lambda: cdb.all_to_all_single(
            torch.empty(n), torch.ones(n), *([[1] * n] * 2 if odd else [])
        ),
        "uneven gather": lambda: (
            cdb.all_gather([torch.empty(2) for _ in range(n)], torch.ones(2))
            if not odd
            else cdb.all_gather([torch.empty(2 + (r == 0)) for r in range(n)], torch.ones(2))
        ),
    }
    with pytest.raises(MismatchError) as caught:
        calls[name]()
    return str(caught.value)


MISTAKES = {
    "operation": ("all_reduce sum of float32 (4,)", "broadcast with root 0 of float32 (4,)"),
    "shape": ("all_reduce sum of float32 (2, 3)", "all_reduce sum of float32 (3, 2)"),
    "size": ("of float32 (3,) into float32 (9,)", "of float32 (2,) into float32 (6,)"),
    "dtype": ("all_reduce sum of float32 (4,)", "all_reduce sum of int32 (4,)"),
    "reduce operation": ("all_reduce sum of", "all_reduce max of"),
    "root": ("broadcast with root 0", "broadcast with root 1"),
    "splits": ("all_to_all_single of float32 (3,)", "sending [2, 1, 0]"),
    "splits on one rank": ("all_to_all_single of float32 (3,) into float32 (3,)", "sending [1, 1, 1]"),
    "uneven gather": ("into float32 (2,), (2,), (2,)", "into float32 (3,), (2,), (2,)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_member_hears_both_sides_of_a_mistake(ranks, name):
    # pytorch 158016, nccl 1394, DeepSpeed 6809: other shapes on another rank, and it "succeeds" or stalls
    ours, theirs = MISTAKES[name]
    for text in ranks(3).run(_mistake, name):
        assert "the ranks' calls don't fit together: " in text
        _, _, sides = text.partition("together: ")
        first, second = sides.split("; ")
        assert first.startswith("rank 0, 2: ")
        assert second.startswith("rank 1: ")
        assert ours in first
        assert theirs in second


def _left_out(again):
    """Rank 1 leaves out a call; if `again`, it makes the next one."""
    cdb = checked()
    if cdb.get_rank() == 1:
        if not again:
            return "stayed away"
        with pytest.raises(MismatchError) as caught:
            cdb.broadcast(torch.ones(3), 0)
        return str(caught.value)
    with pytest.raises((MismatchError, CallTimeoutError)) as caught:
        cdb.all_reduce(torch.ones(4))
    return str(caught.value)


def test_a_call_left_out_is_found_at_the_next_one(ranks):
    for text in ranks(3).run(_left_out, True):
        assert "rank 0, 2: all_reduce sum" in text
        assert "rank 1: broadcast" in text


def test_a_rank_that_makes_no_further_call_is_named_in_time(ranks):
    # DeepSpeed 5794: one rank skips the last layer
    first, away, third = ranks(3).run(_left_out, False)
    assert away == "stayed away"
    for text in (first, third):
        assert "all_reduce #1 on group 'world'" in text
        assert "rank 1 did not arrive" in text


def _one_call_too_many():
    cdb = checked()
    cdb.all_reduce(torch.ones(4))
    if cdb.get_rank() == 1:
        with pytest.raises(CallTimeoutError) as caught:
            cdb.all_reduce(torch.ones(4))
        return str(caught.value)
    return ""


def test_one_call_too_many_names_those_who_did_not_make_it(ranks):
    text = ranks(3).run(_one_call_too_many)[1]
    assert "all_reduce #2" in text
    assert "rank 0 did not arrive" in text
    assert "rank 2 did not arrive" in text


def _groups_in_another_order():
    cdb = checked()
    a, b = cdb.new_group([0, 1]), cdb.new_group([0, 1])
    for group in (a, b) if cdb.get_rank() == 0 else (b, a):
        cdb.all_reduce(torch.ones(4), group=group)


def _error_of(function, *args):
    try:
        function(*args)
    except (MismatchError, CallTimeoutError) as error:
        return str(error)
    return ""


def test_groups_used_in_another_order_name_what_each_waits_in(ranks):
    # Megatron-LM PR 7546
    texts = ranks(2).run(_error_of, _groups_in_another_order)
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank} did not arrive (it waits in all_reduce #1 on group" in text


def _message():
    cdb = checked()
    if cdb.get_rank() == 0:
        cdb.isend(torch.ones(4), 1)
        return ""
    with pytest.raises(MismatchError) as caught:
        cdb.recv(torch.ones(8), 0)
    return str(caught.value)


def test_a_message_of_another_size_is_an_error_of_its_receiver(ranks):
    text = ranks(2).run(_message)[1]
    assert "a message of float32 (4,) meets a receive of float32 (8,)" in text
    ranks(2).close()


class Arrived(Pending):
    """A message that is here."""

    def poll(self):
        return True


def test_a_message_that_comes_before_its_senders_word_is_compared_too():
    store = HashStore()
    pending = _ComparedMessage(Arrived(), store, "key", torch.ones(8), "recv")
    assert not pending.poll()
    assert not pending.orderable()
    store.set("key", "send of float32 (4,)")
    with pytest.raises(MismatchError, match=r"a message of float32 \(4,\) meets a receive of float32 \(8,\)"):
        pending.poll()
    store.set("key", "send of float32 (2, 4)")
    right = _ComparedMessage(Arrived(), store, "key", torch.ones(8), "recv")
    assert right.poll()


def _right_calls(count):
    cdb = checked(timeout_s=60)
    group, members = sub_group()
    n = cdb.get_world_size()
    for step in range(count // 4):
        tensor = torch.ones(step % 5)
        cdb.all_reduce(tensor)
        assert (tensor == n).all()
        if cdb.get_rank() in members:
            cdb.all_gather_into_tensor(torch.empty(2 * len(members), 2), torch.ones(2, 2), group=group, async_op=True)
        if step % 2:
            cdb.barrier()
        elif cdb.get_rank() == 0:
            cdb.send(torch.ones(2, 3), 1)
        elif cdb.get_rank() == 1:
            cdb.recv(torch.ones(3, 2), 0)
        rows = [step % 3] * n
        cdb.all_to_all_single(torch.empty(sum(rows), 2), torch.ones(sum(rows), 2), rows, rows)
    cdb.barrier()


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.stress)])
def test_right_calls_raise_no_alarm(ranks, count):
    ranks(3).run(_right_calls, count, timeout_s=250)
