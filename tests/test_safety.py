"""Programs that hang when backends are mixed without care, and the barrier that names who is missing."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from tests.backends import BACKENDS
from tests.programs import face, sub_group, use

LARGE = 4_000_000  # 16 MB of float32: MPI sends such messages only while both ends are inside MPI


def _the_killer(seed):
    cdb = use({"default": "gloo", "all_reduce": "mpi"})
    tensor, other = torch.ones(LARGE), torch.ones(8)
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == seed % cdb.get_world_size():
        cdb.broadcast(other, 0)  # gloo, while this rank's MPI operation is unfinished
        work.wait()
    else:
        work.wait()
        cdb.broadcast(other, 0)
    assert tensor[0] == tensor[-1] == cdb.get_world_size()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_unfinished_mpi_operation_survives_a_wait_in_gloo(ranks, world_size):
    for seed in range(4):
        ranks(world_size).run(_the_killer, seed, timeout_s=30)


def _messages_and_a_collective_between():
    cdb = use({"default": "gloo", "send_recv": "mpi"})
    rank = cdb.get_rank()
    tensor = torch.full((LARGE,), float(rank))
    if rank == 0:  # legal on one backend: the message is taken only after the collective
        work = cdb.isend(tensor, 1)
        cdb.all_reduce(torch.ones(8))
        work.wait()
    else:
        cdb.all_reduce(torch.ones(8))
        cdb.recv(tensor, 0)
        assert (tensor == 0).all()


def test_a_message_is_not_waited_for_before_a_collective(ranks):
    ranks(2).run(_messages_and_a_collective_between, timeout_s=30)


def _waits_in_reverse():
    cdb = use({"default": "gloo", "all_reduce": "mpi"})
    n = cdb.get_world_size()
    reduced = [torch.full((LARGE // 4,), float(i)) for i in range(3)]
    gathered = [torch.empty(LARGE // 4 * n) for _ in range(3)]
    works = []
    for r, g in zip(reduced, gathered, strict=True):
        works.append(cdb.all_gather_into_tensor(g, torch.ones(LARGE // 4), async_op=True))
        works.append(cdb.all_reduce(r, async_op=True))
    for work in reversed(works):
        work.wait()
    assert [r[-1].item() for r in reduced] == [0.0, n, 2.0 * n]
    assert all((g == 1).all() for g in gathered)


def test_operations_on_two_backends_are_waited_for_in_reverse(ranks):
    ranks(2).run(_waits_in_reverse, timeout_s=60)


def _both_send_first(backend):
    cdb = use({"default": backend})
    peer = 1 - cdb.get_rank()
    out, into = torch.full((2_097_152,), float(cdb.get_rank())), torch.empty(2_097_152)
    import deepspeed.comm as dist

    sending = dist.isend(out, peer)
    receiving = dist.irecv(into, peer)
    receiving.wait()
    sending.wait()
    assert (into == peer).all()


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_both_ranks_send_before_they_receive(ranks, backend):
    # DeepSpeed PR 8303: its isend blocked, with 8 MiB both ways
    ranks(2).run(_both_send_first, backend, timeout_s=30)


def _busy_elsewhere():
    """Rank 0 waits for something that the plugin knows nothing of, as a host does in a GPU's tensor.item()."""
    cdb = use({"default": "mpi"})
    cdb.runtime.progress.drive_in_background()
    tensor = torch.ones(LARGE)
    began = time.monotonic()
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == 0:
        time.sleep(4)
    work.wait()
    assert (tensor == cdb.get_world_size()).all()
    return time.monotonic() - began


def test_a_host_that_waits_elsewhere_is_driven_in_the_background(ranks):
    assert ranks(2).run(_busy_elsewhere, timeout_s=30)[1] < 3


def _waited_for_long_after_the_call(backend):
    cdb = use({"default": backend}, timeout_s=2)
    group = cdb.new_group([0, 1])
    tensor = torch.ones(10)
    cdb.barrier()
    if cdb.get_rank() == 1:
        time.sleep(2.5)
    work = cdb.all_reduce(tensor, group=group, async_op=True)
    if cdb.get_rank() == 0:
        time.sleep(1.5)
    work.wait()
    assert (tensor == 2).all()
    cdb.destroy_process_group(group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_limit_of_a_call_counts_from_its_wait(ranks, backend):
    # gloo's own counts from the call, and its error names no rank
    ranks(2).run(_waited_for_long_after_the_call, backend, timeout_s=30)


def _a_group_while_a_call_is_under_way():
    cdb = use({"default": "mpi"})
    tensor = torch.ones(4_000_000)
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == 1:
        work.wait()  # needs rank 0, which has gone on to the next line
    group = cdb.new_group([0, 1])
    work.wait()
    assert (tensor == 2).all()
    cdb.destroy_process_group(group)


def test_a_rank_that_makes_a_group_drives_its_calls(ranks):
    ranks(2).run(_a_group_while_a_call_is_under_way, timeout_s=30)


def _two_threads():
    cdb = use({"default": "mpi", "all_reduce": "gloo"})
    other_group = cdb.new_group(range(cdb.get_world_size()))
    errors = []

    def gather():
        try:
            for _ in range(50):
                output = torch.empty(100 * cdb.get_world_size())
                cdb.all_gather_into_tensor(output, torch.ones(100), group=other_group)
                assert (output == 1).all()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    for _ in range(50):
        tensor = torch.ones(100)
        cdb.all_reduce(tensor)
        assert (tensor == cdb.get_world_size()).all()
    thread.join()
    assert not errors, errors


def test_two_threads_use_two_backends_at_once(ranks):
    ranks(2).run(_two_threads)


def _late_rank(late_s):
    cdb = face()
    start = time.monotonic()
    if cdb.get_rank() == 2:
        time.sleep(late_s)
    try:
        cdb.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def test_a_monitored_barrier_names_the_missing_rank_in_time(ranks):
    # DeepSpeed 4488: the timeout was of no use
    results = ranks(3).run(_late_rank, 3)
    for text, elapsed in results[:2]:
        assert "rank 2 did not arrive within 1 s" in text
        assert elapsed < 2
    assert [text for text, _ in ranks(3).run(_late_rank, 0)] == ["", "", ""]


def _monitored_sub_group():
    group, ranks = sub_group()
    if face().get_rank() in ranks:
        face().monitored_barrier(group=group, timeout=timedelta(seconds=20))


def test_a_monitored_barrier_of_a_sub_group(ranks):
    ranks(3).run(_monitored_sub_group)


def _dropped():
    cdb = use({"default": "mpi"})
    peer = 1 - cdb.get_rank()
    most = 0
    for step in range(300):
        cdb.isend(torch.ones(10), peer)
        cdb.irecv(torch.empty(10), peer)
        cdb.all_reduce(torch.ones(100), async_op=True)
        if step % 10 == 0:
            cdb.barrier()  # so that no rank is far ahead of the other
        most = max(most, len(cdb.runtime.progress._unfinished))
    assert most < 300, most  # of 900
    assert cdb.runtime.progress.wait_until(lambda: not cdb.runtime.progress, timeout_s=10)


def test_operations_that_nobody_waits_for_do_not_pile_up(ranks):
    ranks(2).run(_dropped)
