"""Every operation on every backend, blocking and not, on the world and on a sub-group, against plain torch."""

import time

import pytest
import torch

from deepspeed_mcrdl.operations import ALL_REDUCE, ALL_TO_ALL_SINGLE, BROADCAST
from deepspeed_mcrdl.stores import Patient
from tests.backends import BACKENDS, PAIRS
from tests.programs import face, filled, sub_group, use

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
REDUCE_OPS = {
    "SUM": lambda stack: stack.sum(0),
    "MIN": lambda stack: stack.min(0).values,
    "MAX": lambda stack: stack.max(0).values,
    "PRODUCT": lambda stack: stack.prod(0),
    "AVG": lambda stack: stack.sum(0) / stack.shape[0],
    "BAND": lambda stack: torch.tensor([_fold(torch.bitwise_and, column) for column in stack.T]),
    "BOR": lambda stack: torch.tensor([_fold(torch.bitwise_or, column) for column in stack.T]),
    "BXOR": lambda stack: torch.tensor([_fold(torch.bitwise_xor, column) for column in stack.T]),
}
COUNT = 7


def _fold(operator, values):
    result = values[0]
    for value in values[1:]:
        result = operator(result, value)
    return int(result)


def _finish(work):
    if work is not None:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


def _expect(got, wanted, what):
    assert torch.equal(got, wanted.to(got.dtype)), f"{what}: got {got.tolist()}, wanted {wanted.tolist()}"


def _all_operations(backend):
    cdb = use({"default": backend})
    group, ranks = sub_group()
    everybody = list(range(cdb.get_world_size()))
    for torch_group, members in ((None, everybody), (group, ranks)):
        if cdb.get_rank() not in members:
            continue
        for async_op in (False, True):
            for dtype in DTYPES:
                _movements(cdb, torch_group, members, dtype, async_op)
                _reductions(cdb, torch_group, members, dtype, async_op)
            _finish(cdb.barrier(group=torch_group, async_op=async_op))
    declared = type(cdb.runtime.backends[backend])
    for (operation, _, _, *signature), route in cdb.runtime._routes.items():
        dtype, op = signature[0] if signature else None, signature[-1] if operation.reduces else None
        if declared.lacks(operation, dtype, "cpu", op) is None:
            assert route.backend == backend, (operation, signature)
    if group is not None and cdb.get_rank() in ranks:
        cdb.destroy_process_group(group)


def _movements(cdb, group, members, dtype, async_op):
    me, n = members.index(cdb.get_rank()), len(members)
    sent = [filled(COUNT * n, dtype, seed=rank) for rank in members]  # what each member has
    own = sent[me]
    blocks = [s.view(n, COUNT) for s in sent]
    root = members[-1]

    tensor = own.clone()
    _finish(cdb.broadcast(tensor, root, group, async_op))
    _expect(tensor, sent[-1], "broadcast")

    output = torch.empty(COUNT * n * n, dtype=dtype)
    _finish(cdb.all_gather_into_tensor(output, own, group, async_op))
    _expect(output, torch.cat(sent), "all_gather_into_tensor")

    output[me * own.numel() : (me + 1) * own.numel()] = own  # as ZeRO does: gather from a view of the output
    _finish(cdb.all_gather_into_tensor(output, output[me * own.numel() : (me + 1) * own.numel()], group, async_op))
    _expect(output, torch.cat(sent), "all_gather_into_tensor in place")

    outputs = [torch.empty(COUNT * n, dtype=dtype) for _ in members]
    _finish(cdb.all_gather(outputs, own, group, async_op))
    _expect(torch.cat(outputs), torch.cat(sent), "all_gather")

    outputs = [torch.empty(COUNT * n, dtype=dtype) for _ in members] if members[me] == root else None
    _finish(cdb.gather(own, outputs, root, group, async_op))
    if outputs is not None:
        _expect(torch.cat(outputs), torch.cat(sent), "gather")

    output = torch.empty(COUNT, dtype=dtype)
    _finish(cdb.scatter(output, list(blocks[-1]) if members[me] == root else None, root, group, async_op))
    _expect(output, blocks[-1][me], "scatter")

    output = torch.empty(COUNT * n, dtype=dtype)
    _finish(cdb.all_to_all_single(output, own, group=group, async_op=async_op))
    _expect(output, torch.cat([b[me] for b in blocks]), "all_to_all_single")

    # rank i sends i + j rows to rank j, so one pair has nothing to say
    rows = [[i + j for j in range(n)] for i in range(n)]
    parts = [filled(sum(rows[i]) * 2, dtype, seed=i).view(-1, 2) for i in range(n)]
    received = [rows[i][me] for i in range(n)]
    output = torch.empty(sum(received), 2, dtype=dtype)
    _finish(cdb.all_to_all_single(output, parts[me], received, rows[me], group, async_op))
    _expect(output, torch.cat([parts[i].split(rows[i])[me] for i in range(n)]), "all_to_all_single with splits")

    outputs = [torch.empty(COUNT, dtype=dtype) for _ in members]
    _finish(cdb.all_to_all(outputs, list(blocks[me]), group, async_op))
    _expect(torch.cat(outputs), torch.cat([b[me] for b in blocks]), "all_to_all")

    after, before = members[(me + 1) % n], members[me - 1]
    if n > 1:
        arrived = torch.empty_like(own)
        works = [cdb.irecv(arrived, before, group, tag=5), cdb.isend(own, after, group, tag=5)]
        for work in works:
            _finish(work)
        _expect(arrived, sent[me - 1], "isend and irecv")
        if me == 0:
            cdb.send(own, after, group, tag=1)
        elif me == 1:
            assert cdb.recv(arrived, None, group, tag=1) == before
            _expect(arrived, sent[0], "send and recv from any source")


def _reductions(cdb, group, members, dtype, async_op):
    me, n = members.index(cdb.get_rank()), len(members)
    for name, reduce in REDUCE_OPS.items():
        if (name.startswith("B") and dtype.is_floating_point) or (name == "AVG" and not dtype.is_floating_point):
            continue
        op = getattr(torch.distributed.ReduceOp, name)
        sent = torch.stack([filled(COUNT * n, dtype, seed=rank) for rank in members])
        wanted = reduce(sent)
        own = sent[me]

        tensor = own.clone()
        _finish(cdb.all_reduce(tensor, op, group, async_op))
        _expect(tensor, wanted, f"all_reduce {name}")

        tensor = own.clone()
        _finish(cdb.reduce(tensor, members[-1], op, group, async_op))
        if me == n - 1:
            _expect(tensor, wanted, f"reduce {name}")

        output = torch.empty(COUNT, dtype=dtype)
        _finish(cdb.reduce_scatter_tensor(output, own.clone(), op, group, async_op))
        _expect(output, wanted.view(n, COUNT)[me], f"reduce_scatter_tensor {name}")

        output = torch.empty(COUNT, dtype=dtype)
        _finish(cdb.reduce_scatter(output, list(own.view(n, COUNT).clone()), op, group, async_op))
        _expect(output, wanted.view(n, COUNT)[me], f"reduce_scatter {name}")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_is_right(ranks, backend, world_size):
    ranks(world_size).run(_all_operations, backend)


def _uneven_gather():
    cdb = use({"default": "mpi"})
    sizes = [0, 3, 1]
    outputs = [torch.empty(size) for size in sizes]
    cdb.all_gather(outputs, torch.full((sizes[cdb.get_rank()],), float(cdb.get_rank())))
    assert [output.tolist() for output in outputs] == [[], [1.0] * 3, [2.0]]


def test_mpi_gathers_uneven_blocks(ranks):
    ranks(3).run(_uneven_gather)


def _strided(backend):
    cdb = use({"default": backend})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    for async_op in (False, True):
        whole = torch.full((4, 6), float(rank + 1))
        work = cdb.all_reduce(whole.t()[1:4], async_op=async_op)
        if work is not None:
            work.wait()
        assert (whole[:, 1:4] == n * (n + 1) / 2).all()
        assert (whole[:, :1] == rank + 1).all()

        output = torch.zeros(4 * n, 2)[::2]
        cdb.all_gather_into_tensor(output, torch.full((2, 2), float(rank)).t())
        assert output[:, 0].tolist() == [float(r) for r in range(n) for _ in range(2)]

        image = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
        cdb.broadcast(image, 0)
        assert (image == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_tensors_are_updated_in_place(ranks, backend):
    # pytorch 192920, Megatron-LM 5337: wrong values, or the caller's tensor not updated
    ranks(2).run(_strided, backend)


def _empty(backend):
    cdb = use({"default": backend})
    n = cdb.get_world_size()
    nothing = torch.empty(0)
    cdb.all_reduce(nothing)
    output = torch.empty(n, 0, 2)
    cdb.all_gather_into_tensor(output, torch.empty(1, 0, 2))
    outputs = [torch.empty(1, 0, 2) for _ in range(n)]
    cdb.all_gather(outputs, torch.empty(1, 0, 2))
    assert [tuple(o.shape) for o in outputs] == [(1, 0, 2)] * n
    cdb.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3), [0] * n, [0] * n)
    scalar = torch.tensor(2.0)
    cdb.all_reduce(scalar)
    assert scalar.item() == 2.0 * n


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_and_a_single_number_travel_too(ranks, backend):
    # pytorch 146468, 85234, horovod 2259
    ranks(2).run(_empty, backend)


def _shapes_differ(backend):
    cdb = use({"default": backend})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    output = torch.empty(4 * n)
    cdb.all_gather_into_tensor(output, torch.full((2, 2), float(rank)))
    assert output.view(n, 4)[:, 0].tolist() == list(range(n))
    outputs = [torch.empty(4) for _ in range(n)]
    cdb.all_gather(outputs, torch.full((2, 2), float(rank)))
    assert [o[0].item() for o in outputs] == list(range(n))
    output = torch.empty(4)
    cdb.reduce_scatter_tensor(output, torch.ones(2 * n, 2))
    assert output.tolist() == [n] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_differ_in_shape_but_not_in_size(ranks, backend):
    # DeepSpeed's gather_tokens (MoE with tensor parallelism) does so, which stock gloo refuses
    ranks(2).run(_shapes_differ, backend)


def _reported_when_strange():
    cdb = face()
    with pytest.raises(Exception, match="no backend in use can do"):
        cdb.all_reduce(torch.ones(2), torch.distributed.ReduceOp.BAND)
    with pytest.raises(Exception, match="can't be divided"):
        cdb.all_to_all_single(torch.empty(3), torch.empty(3))


def test_a_call_that_cannot_be_done_is_refused_on_every_rank(ranks):
    ranks(2).run(_reported_when_strange)


def _looks_at_what_cannot_end_yet(way):
    """Sleep for calls that the last rank makes late; return how late, at most, a sleep ended."""
    cdb = use({})
    runtime, rank, n, tensor = cdb.runtime, cdb.get_rank(), cdb.get_world_size(), torch.ones(4)
    latest = 0.0
    for operation, args in (
        (ALL_REDUCE, (tensor, "sum")),
        (ALL_TO_ALL_SINGLE, (torch.empty(2 * n), torch.ones(2 * n), None, None)),
        (BROADCAST, (tensor, n - 1)),
    ):
        for limit_s in (0.0, 5e-5, 9e-4, 2e-2):
            cdb.barrier()
            if rank == n - 1:
                time.sleep(0.2)
                runtime.issue(operation, None, args, backend=way)
                continue
            work = runtime.issue(operation, None, args, True, way)
            for _ in range(3):
                work.is_completed()  # which starts the next step of a call that has several
                start = time.perf_counter()
                work._pending.block(limit_s)
                latest = max(latest, time.perf_counter() - start - limit_s)
            work.wait()
    return latest


@pytest.mark.parametrize("way", [*BACKENDS, *PAIRS])
def test_a_sleeping_wait_keeps_its_limit(ranks, way):
    """Or the calls that this thread must drive, for which others may wait, stand still: a deadlock."""
    assert max(ranks(4, "abba" if "+" in way else "").run(_looks_at_what_cannot_end_yet, way)) < 0.1


def _left_as_soon_as_joined(late):
    """Rank `late` finds the others' addresses when they have joined, and could have left, long since."""
    runtime = use({}).runtime
    gloo = runtime.backends["gloo"]
    get = Patient.get

    def get_late(store, key):
        time.sleep(0.1)
        return get(store, key)

    if runtime.rank == late:
        Patient.get = get_late
    try:
        for _ in range(10):  # which of two ranks connects to the other is up to their ports
            group = runtime.groups.make([0, 1], "left as soon as joined")
            gloo.join(group)
            gloo.leave(group)
    finally:
        Patient.get = get


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_may_be_left_as_soon_as_it_is_joined(ranks, late):
    ranks(2).run(_left_as_soon_as_joined, late)
