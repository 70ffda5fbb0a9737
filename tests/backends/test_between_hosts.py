"""Backends between hosts, which are names here: MPI takes its network between them."""

import random

import torch

from deepspeed_mcrdl.operations import RECV, SEND
from tests.programs import use


def _messages_from_any(count):
    """Random messages, each rank sending ahead, and received from any rank or from one, all with one tag.

    Short ones first, and the long ones after a barrier: a receive from any rank takes what comes first.
    """
    cdb = use({"default": "mpi"})
    runtime, rank = cdb.runtime, cdb.get_rank()
    shared = random.Random(7)
    counts = dict.fromkeys(range(4), 0)
    for size in (4, 20_000):
        sends = []
        for number in range(count // 2):
            source, target = shared.sample(range(4), 2)
            if rank == source:
                message = torch.full((size,), float(number))
                sends.append(runtime.issue(SEND, None, (message, target, 0), True))
            if rank == target:
                received = torch.empty(size)
                work = runtime.issue(RECV, None, (received, None, 0), True)
                work.wait()
                counts[work.source_rank()] += 1
                assert received.unique().numel() == 1
        for send in sends:
            send.wait()
        cdb.barrier()
    return counts


def test_messages_from_any_rank_of_another_host_are_received(ranks):
    # MPICH 5.0.2 loses a receive from any source whose message comes over UCX: it hung within a hundred
    counts = ranks(4, "abba").run(_messages_from_any, 300)
    assert sum(sum(own.values()) for own in counts) == 300


def _in_order():
    cdb = use({"default": "mpi"})
    runtime, rank = cdb.runtime, cdb.get_rank()
    if rank == 3:
        sends = [runtime.issue(SEND, None, (torch.full((3,), float(number)), 0, 5), True) for number in range(6)]
        for send in sends:
            send.wait()
    if rank == 0:
        tensors = [torch.empty(3) for _ in range(6)]
        works = [
            runtime.issue(RECV, None, (tensor, None if number % 3 == 0 else 3, 5), True)
            for number, tensor in enumerate(tensors)
        ]
        for work in reversed(works):
            work.wait()
        return [tensor[0].item() for tensor in tensors]
    return None


def test_receives_from_any_and_from_one_rank_keep_their_order(ranks):
    assert ranks(4, "abba").run(_in_order)[0] == [0, 1, 2, 3, 4, 5]
