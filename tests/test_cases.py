"""Public bug reports on mixing backends that have no better place; each test names its report."""

import logging
import threading

import deepspeed.comm as dist
import pytest
import torch

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl import messages
from deepspeed_mcrdl.backends.base import classes_of
from deepspeed_mcrdl.backends.c10d import GlooBackend
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import UnsupportedError
from deepspeed_mcrdl.operations import ALL_REDUCE, SEND
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.routing.shelf import ENVIRONMENT
from deepspeed_mcrdl.routing.table import Fingerprint, Table
from deepspeed_mcrdl.runtime import current
from tests.backends import BACKENDS
from tests.programs import use


def _then_every_other_backend(first):
    cdb = use({"default": first})
    n = cdb.get_world_size()
    for backend in (first, *(name for name in mcrdl.get_backends() if name != first)):
        group = cdb.new_group(range(n))
        tensor = torch.ones(4)
        mcrdl.all_reduce(tensor, group=group, backend=backend)
        mcrdl.all_reduce(tensor, backend=backend)
        assert (tensor == n * n).all()
        cdb.destroy_process_group(group)


@pytest.mark.parametrize("first", BACKENDS)
def test_a_group_on_another_backend_than_the_first(ranks, first):
    # pytorch 45549: a default group on MPI breaks new_group on another backend
    ranks(2).run(_then_every_other_backend, first)


def _first_use_from_two_threads():
    cdb = use({})
    n = cdb.get_world_size()
    groups = [cdb.new_group(range(n)) for _ in range(2)]
    runtime = current()
    for group in groups:  # as if they had been made behind our back: the first use makes the communicators
        runtime.forget(group)
    errors = []
    together = threading.Barrier(2)

    def use_first_time(backend, group):
        try:
            together.wait()
            for _ in range(20):
                tensor = torch.ones(1000)
                mcrdl.all_reduce(tensor, group=group, backend=backend)
                assert (tensor == n).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use_first_time, args=pair) for pair in zip(("mpi", "gloo"), groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def test_two_backends_used_first_at_the_same_time(ranks):
    # pytorch 159563: the threads of two backends clash on the store
    ranks(2).run(_first_use_from_two_threads)


def _pipeline(backends, batched):
    """One forward, one backward: activations to the right, gradients to the left, an all_reduce between."""
    use({})
    rank, n = mcrdl.get_rank(), mcrdl.get_world_size()
    left, right = rank - 1, rank + 1
    size = 300_000  # above what MPI sends without the receiver
    for step in range(12):
        forward, backward = backends[step % len(backends)], backends[(step + 1) % len(backends)]
        out, into = torch.full((size,), float(step)), torch.empty(size)
        grad, grad_in = torch.full((size,), -float(step)), torch.empty(size)
        messages = []
        if right < n:
            messages += [(mcrdl.isend, out, right, forward), (mcrdl.irecv, grad_in, right, backward)]
        if left >= 0:
            messages += [(mcrdl.irecv, into, left, forward), (mcrdl.isend, grad, left, backward)]
        if batched:
            messages.sort(key=lambda message: message[3])
        works = [call(tensor, peer, backend=backend, tag=step) for call, tensor, peer, backend in messages]
        total = torch.ones(8)
        mcrdl.all_reduce(total, backend=backends[step % len(backends)])
        assert (total == n).all()
        for work in works[:: -1 if step % 2 else 1]:
            work.wait()
        assert left < 0 or (into == step).all()
        assert right == n or (grad_in == -step).all()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("backends", [*((name,) for name in BACKENDS), BACKENDS], ids="-".join)
def test_a_1f1b_pipeline_of_messages_over_mixed_backends(ranks, backends, batched):
    # torchcomms PR 2551, pytorch 102943: an ungrouped batch of messages deadlocks a pipeline
    ranks(4).run(_pipeline, backends, batched, timeout_s=60)


def _in_backward():
    """Collectives of the autograd thread and of the main thread, on both backends, one after the other and at once."""
    use({})
    n = mcrdl.get_world_size()

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            output = torch.empty_like(tensor)
            mcrdl.all_to_all_single(output, tensor, backend="mpi")
            return output

        @staticmethod
        def backward(ctx, grad):
            output = torch.empty_like(grad)
            mcrdl.all_to_all_single(output, grad.contiguous(), backend="gloo")
            return output

    other = mcrdl.new_group(range(n))
    for step in range(20):
        tensor = torch.ones(40_000 * n, requires_grad=True)
        under_way = torch.ones(500_000)
        work = mcrdl.all_reduce(under_way, group=other, backend="mpi", async_op=True)
        Exchanged.apply(tensor * (step + 1)).sum().backward()
        assert (tensor.grad == step + 1).all()
        work.wait()
        assert (under_way == n).all()


def test_backward_communicates_while_the_main_thread_has_operations_under_way(ranks):
    ranks(2).run(_in_backward)


def _overlapping():
    """Two groups that share ranks, in an order of each rank's own where they are asynchronous."""
    cdb = use({})
    rank = cdb.get_rank()
    left, right = cdb.new_group([0, 1]), cdb.new_group([1, 2])
    for step in range(30):
        pairs = [(group, members) for group, members in ((left, [0, 1]), (right, [1, 2])) if rank in members]
        if step % 2 and rank == 1:
            pairs.reverse()
        tensors = [torch.ones(100_000) for _ in pairs]
        works = [
            mcrdl.all_reduce(tensor, group=group, backend=BACKENDS[(step + members[0]) % len(BACKENDS)], async_op=True)
            for tensor, (group, members) in zip(tensors, pairs, strict=True)
        ]
        for work in works:
            work.wait()
        assert all((tensor == 2).all() for tensor in tensors)
    dist.barrier()


def test_overlapping_groups_whose_members_meet_in_different_orders(ranks):
    ranks(3).run(_overlapping)


def _averages():
    cdb = use({})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    group = cdb.new_group([0, 2])
    for backend in BACKENDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tensor = torch.full((5,), 3.0 * rank, dtype=dtype)
            mcrdl.all_reduce(tensor, "avg", backend=backend)
            assert (tensor == 3.0 * (n - 1) / 2).all()
            if rank != 1:
                tensor = torch.full((5,), 3.0 * rank, dtype=dtype)
                mcrdl.all_reduce(tensor, "avg", group=group, backend=backend)
                assert (tensor == 3.0).all()
        with pytest.raises(UnsupportedError, match=r"has no avg of torch\.int64"):
            mcrdl.all_reduce(torch.ones(5, dtype=torch.int64), "avg", backend=backend)


def test_an_average_divides_by_the_size_of_the_group(ranks):
    # pytorch 162338, torchcomms PR 287: summed, or divided by the wrong number. Of integers it is refused.
    ranks(3).run(_averages)


def test_a_rules_backend_without_messages_leaves_them_to_another_and_says_so_once(caplog):
    # DeepSpeed 5313: a backend lacks send and recv, and the pipeline fails late
    class Collectives(GlooBackend):
        name = "collectives"

        @classmethod
        def lacks(cls, operation, dtype, device, op):
            return "has no messages" if not operation.collective else super().lacks(operation, dtype, device, op)

    router = Router(
        parse({"routing": {"default": "collectives"}}).routing, {"collectives": Collectives, "gloo": GlooBackend}
    )
    with caplog.at_level(logging.WARNING, logger="deepspeed_mcrdl"):
        messages.logger.propagate = True
        for _ in range(3):
            decision = router.decide(Key(SEND, "pipeline_parallel", torch.float32, "cpu"))
    assert decision.backend == "gloo"
    said = [record.message for record in caplog.records]
    assert said == [
        "send float32 cpu on a pipeline_parallel group: carried by gloo, because collectives has no messages"
    ]
    assert router.decide(Key(ALL_REDUCE, "world", torch.float32, "cpu", "sum")).backend == "collectives"
    auto = Router(parse({}).routing, {"collectives": Collectives, "gloo": GlooBackend})
    with caplog.at_level(logging.WARNING, logger="deepspeed_mcrdl"):  # nobody has asked for it: nothing to say
        decision = auto.decide(Key(SEND, "pipeline_parallel", torch.bfloat16, "cpu"))
    assert decision.why == "preference order (collectives has no messages)"
    assert [record.message for record in caplog.records] == said


def _conflicting_tables(folder):
    rank = dist.get_rank()
    own = folder / str(rank)
    own.mkdir()
    backend = BACKENDS[rank % len(BACKENDS)]
    entry = {"operation": "all_reduce", "dtype": "float", "device": "cpu", "mesh": current().groups.world.mesh}
    here = Fingerprint.here(classes_of(current().backends))
    steps = ({"backend": backend},)
    table = Table(
        made=f"2026-12-0{rank + 1}",
        how="a test",
        fingerprint=here,
        entries=({**entry, "steps": steps, "unsized": backend},),
    )
    table.write(own / "table.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(own))
        use({})
    key = Key(ALL_REDUCE, "world", torch.float32, "cpu", "sum", 4000, current().groups.world.mesh)
    decision = current().router.decide(key)
    for count in (1, 1000):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert (tensor == dist.get_world_size()).all()
    return decision, str(current().table.path)


def test_ranks_with_conflicting_tables_use_that_of_rank_0(ranks, tmp_path):
    # sgl-project 35343, flashinfer 3186: ranks tune alone, choose differently and deadlock
    first, *others = ranks(3).run(_conflicting_tables, tmp_path)
    assert first[0].backend == BACKENDS[0]
    assert first[0].why == "table, all sizes"
    assert first[1] == str(tmp_path / "0" / "table.json")
    assert all(other == first for other in others)
