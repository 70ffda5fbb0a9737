"""Every operation that deepspeed.comm can call, in the forms in which it calls them."""

import inspect
import time

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import comm
from deepspeed.comm.torch import TorchBackend

from deepspeed_mcrdl.faces.deepspeed_backend import MCRDLBackend
from tests.backends import BACKENDS
from tests.programs import face, sub_group, use


def test_signatures_are_those_of_the_stock_backend():
    for name, method in inspect.getmembers(TorchBackend, inspect.isfunction):
        if name.startswith("_") or name == "all_gather_base" or name not in vars(MCRDLBackend):
            continue
        stock = inspect.signature(_undecorated(name, method))
        ours = inspect.signature(getattr(MCRDLBackend, name))
        assert list(ours.parameters) == list(stock.parameters), name


def _undecorated(name, method):
    """Return what stage_on_cpu wraps; it keeps the function in its closure."""
    cells = [cell.cell_contents for cell in method.__closure__ or ()]
    return next((cell for cell in cells if inspect.isfunction(cell) and cell.__name__ == name), method)


def _through_deepspeed_comm(logged):
    use({})
    comm.configure(enabled=logged, prof_all=logged, verbose=False)
    try:
        _call_everything()
        if not logged:  # DeepSpeed's logger ends the process, with status 0, at an operation that it doesn't know
            _call_what_the_logger_does_not_know()
        else:
            names = set(comm.comms_logger.comms_dict)
            assert {"all_reduce", "all_to_all_single", "broadcast", "send", "recv", "barrier"} <= names, names
    finally:
        comm.configure(enabled=False)


def _call_everything():
    rank, n = dist.get_rank(), dist.get_world_size()
    total = n * (n + 1) / 2
    ones = torch.full((4,), float(rank + 1))

    t = ones.clone()
    dist.all_reduce(t)
    assert (t == total).all()
    t = ones.clone()
    dist.inference_all_reduce(t)
    assert (t == total).all()
    several = [ones.clone(), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    dist.all_reduce_coalesced(several)
    assert (several[0] == total).all()
    assert (several[1] == n).all()
    assert (several[2] == n).all()
    t = ones.clone()
    dist.reduce(t, 0)
    assert rank or (t == total).all()
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(n)])
    assert (out == rank * n).all()
    dist.reduce_scatter_fn(out, torch.ones(2 * n))
    assert (out == n).all()
    dist.reduce_scatter_tensor(out, torch.ones(2 * n), op=dist.ReduceOp.MAX)
    assert (out == 1).all()
    t = ones.clone()
    dist.broadcast(t, n - 1)
    assert (t == n).all()
    parts = [torch.empty(4) for _ in range(n)]
    dist.all_gather(parts, ones)
    assert [p[0].item() for p in parts] == [r + 1.0 for r in range(n)]
    whole = torch.empty(4 * n)
    dist.allgather_fn(whole, ones)
    assert whole[::4].tolist() == [r + 1.0 for r in range(n)]
    wholes = [torch.empty(4 * n), torch.empty(4 * n)]
    dist.all_gather_coalesced(wholes, [ones, ones * 2])
    assert wholes[1][::4].tolist() == [2 * (r + 1.0) for r in range(n)]
    out = torch.empty(n)
    dist.all_to_all_single(out, torch.full((n,), float(rank)))
    assert out.tolist() == [float(r) for r in range(n)]
    outs = [torch.empty(1) for _ in range(n)]
    dist.all_to_all(outs, [torch.full((1,), float(rank)) for _ in range(n)])
    assert [o.item() for o in outs] == list(range(n))
    dist.gather(ones, [torch.empty(4) for _ in range(n)] if rank == 1 else None, dst=1)
    out = torch.empty(1)
    dist.scatter(out, [torch.full((1,), float(r)) for r in range(n)] if rank == 1 else None, src=1)
    assert out.item() == rank

    peer = (rank + 1) % n
    before = (rank - 1) % n
    into = torch.empty(4)
    if rank % 2 == 0:
        dist.send(ones, peer)
        dist.recv(into, before)
    else:
        dist.recv(into, before)
        dist.send(ones, peer)
    assert (into == before + 1).all()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer), dist.P2POp(dist.irecv, into, before)])
    for work in works:
        work.wait()

    objects = ["a", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == ["a", 1]
    dist.barrier()


def _call_what_the_logger_does_not_know():
    rank, n = dist.get_rank(), dist.get_world_size()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "pad": "x" * rank})
    assert [o["rank"] for o in objects] == list(range(n))
    dist.monitored_barrier()


@pytest.mark.parametrize("logged", [False, True])
def test_everything_through_deepspeed_comm(ranks, logged):
    # DeepSpeed PR 8267: every operation under its logger
    ranks(2).run(_through_deepspeed_comm, logged)


def _logged_sub_group():
    comm.configure(enabled=True, prof_all=True, verbose=False)
    try:
        group, ranks = sub_group()
        if dist.get_rank() in ranks:
            t = torch.ones(4)
            dist.all_reduce(t, group=group)
            assert (t == len(ranks)).all()
    finally:
        comm.configure(enabled=False)


def test_a_logged_call_of_a_sub_group_returns(ranks):
    # DeepSpeed timed_op: a world barrier after it
    ranks(3).run(_logged_sub_group, timeout_s=30)


def _mesh():
    import deepspeed.utils.groups as groups

    mesh = dist.initialize_mesh_device((2, 2), ("data_parallel", "tensor_parallel"))
    group = mesh.get_group("tensor_parallel")
    saved, groups.mesh_device = groups.mesh_device, mesh
    try:
        runtime = face().runtime
        assert runtime.groups.of(group).kind == "tensor_parallel"
        t = torch.ones(4)
        dist.all_reduce(t, group=group)
        assert (t == 2).all()
    finally:
        groups.mesh_device = saved


def test_mesh_groups_have_their_kind_and_communicators(ranks):
    ranks(4).run(_mesh)


def _strangers_group():
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="not a member"):
            dist.all_reduce(torch.ones(1), group=group)


def test_a_call_on_a_group_of_others_is_an_error(ranks):
    ranks(2).run(_strangers_group)


def _asynchronous():
    n = dist.get_world_size()
    t = torch.ones(1000)
    work = dist.all_reduce(t, async_op=True)
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.is_success()
    assert (t == n).all()
    work = dist.all_reduce(t, async_op=True)
    work.get_future().wait()
    assert (t == n * n).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handle_tells_when_it_is_done(ranks, backend):
    ranks(2).run(use_and_run, backend)


def use_and_run(backend):
    use({"default": backend})
    _asynchronous()
