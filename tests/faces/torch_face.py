"""Programs on torch.distributed with the backend "mcrdl"; each is run on every rank as `python torch_face.py NAME`."""

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
QUIET = {"banner": False, "routing": {"all_reduce": "gloo"}}


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def start(name="mcrdl"):
    dist.init_process_group(name, pg_options=QUIET, timeout=timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def carried():
    """Return operation:backend of all calls that went through the runtime."""
    from deepspeed_mcrdl.runtime import current

    return sorted({f"{key[0]}:{route.backend}" for key, route in current()._routes.items()})


def operations():
    """Every function of torch.distributed, blocking and not."""
    rank, n = start()
    group = dist.new_group(range(n))
    for pg in (None, group):
        for async_op in (False, True):
            _every_function(rank, n, pg, async_op)
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "pad": "x" * rank})
    assert [o["rank"] for o in objects] == list(range(n))
    objects = ["a", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == ["a", 1]
    received = [None]
    dist.scatter_object_list(received, [f"to {r}" for r in range(n)] if rank == 0 else None, 0)
    assert received == [f"to {rank}"]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered in (None, list(range(n)))
    say("CARRIED", *carried())
    dist.destroy_process_group(group)


def _finish(work):
    if work is not None:
        work.wait()
        assert work.is_completed()
        assert work.is_success()


def _every_function(rank, n, group, async_op):
    more = {"group": group, "async_op": async_op}
    ones = torch.full((4,), float(rank + 1))
    total = n * (n + 1) / 2
    for op, wanted in (("SUM", total), ("AVG", total / n), ("MAX", n), ("MIN", 1.0)):
        tensor = ones.clone()
        _finish(dist.all_reduce(tensor, getattr(dist.ReduceOp, op), **more))
        assert (tensor == wanted).all(), op
    tensor = ones.clone()
    _finish(dist.reduce(tensor, n - 1, **more))
    assert rank != n - 1 or (tensor == total).all()
    tensor = ones.clone()
    _finish(dist.broadcast(tensor, n - 1, **more))
    assert (tensor == n).all()
    parts = [torch.empty(4) for _ in range(n)]
    _finish(dist.all_gather(parts, ones, **more))
    assert [p[0].item() for p in parts] == [r + 1.0 for r in range(n)]
    whole = torch.empty(4 * n)
    _finish(dist.all_gather_into_tensor(whole, ones, **more))
    assert whole[::4].tolist() == [r + 1.0 for r in range(n)]
    parts = [torch.empty(4) for _ in range(n)] if rank == 0 else None
    _finish(dist.gather(ones, parts, 0, **more))
    tensor = torch.empty(1)
    _finish(dist.scatter(tensor, [torch.full((1,), float(r)) for r in range(n)] if rank == 0 else None, 0, **more))
    assert tensor.item() == rank
    tensor = torch.empty(2)
    _finish(dist.reduce_scatter(tensor, [torch.full((2,), float(r)) for r in range(n)], **more))
    assert (tensor == rank * n).all()
    _finish(dist.reduce_scatter_tensor(tensor, torch.ones(2 * n), **more))
    assert (tensor == n).all()
    out = torch.empty(n)
    _finish(dist.all_to_all_single(out, torch.full((n,), float(rank)), **more))
    assert out.tolist() == [float(r) for r in range(n)]
    _finish(dist.all_to_all_single(out, torch.full((n,), float(rank)), [1] * n, [1] * n, **more))
    outs = [torch.empty(1) for _ in range(n)]
    _finish(dist.all_to_all(outs, [torch.full((1,), float(rank)) for _ in range(n)], **more))
    assert [o.item() for o in outs] == list(range(n))
    _finish(dist.barrier(**more))
    after, before = (rank + 1) % n, (rank - 1) % n
    into = torch.empty(4)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones, after, group), dist.P2POp(dist.irecv, into, before, group)]
    ):
        work.wait()
    assert (into == before + 1).all()
    if rank == 0:
        dist.send(ones, 1, group=group, tag=7)
    elif rank == 1:
        assert dist.recv(into, group=group, tag=7) == 0
        assert (into == 1).all()
    for async_ops in (False, True):
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            several = [torch.ones(2), torch.ones(3)]
            for tensor in several:
                dist.all_reduce(tensor, group=group)
        if async_ops:
            manager.wait()
        assert all((tensor == n).all() for tensor in several)
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=async_ops) as manager:
            several = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
            for tensor in several:
                dist.broadcast(tensor, 0, group=group)
        if async_ops:
            manager.wait()
        assert all((tensor == 0).all() for tensor in several)


def models():
    """DDP, FSDP2, functional collectives, DeviceMesh: gradients are those of one process."""
    rank, n = start("cpu:mcrdl,cuda:mcrdl")
    data = torch.arange(n * 8.0).view(n, 2, 4)

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    alone = model()
    sum(alone(part).square().mean() for part in data).div(n).backward()
    ddp = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0001)
    ddp(data[rank]).square().mean().backward()
    for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    mesh = init_device_mesh("cpu", (n,))
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(data[rank]).square().mean().backward()
    for ours, theirs in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)

    world = dist.group.WORLD
    assert (functional.all_reduce(torch.ones(3), "sum", world) + 0 == n).all()
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, world) + 0
    assert gathered[::2].tolist() == list(range(n))
    assert (functional.reduce_scatter_tensor(torch.ones(2 * n), "sum", 0, world) + 0 == n).all()
    swapped = functional.all_to_all_single(torch.full((n,), float(rank)), None, None, world) + 0
    assert swapped.tolist() == list(range(n))
    compiled = torch.compile(lambda t: functional.all_reduce(t, "sum", world) * 2, backend="aot_eager")
    assert (compiled(torch.ones(3)) == 2 * n).all()
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("a", "b"))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("b"))
    assert (tensor == n).all()
    say("CARRIED", *carried())


def both_faces():
    """torch.distributed's and DeepSpeed's faces in one process: one runtime, and each call counted once."""
    start()
    import deepspeed
    from deepspeed.comm import comm

    import deepspeed_mcrdl as mcrdl
    from deepspeed_mcrdl.observe.log import CommunicationLog
    from deepspeed_mcrdl.runtime import current

    deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    runtime = current()
    assert comm.cdb.runtime is runtime
    log = CommunicationLog()
    runtime.observe(log)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    deepspeed.comm.all_reduce(tensor)
    mcrdl.all_reduce(tensor)
    assert (tensor == dist.get_world_size() ** 3).all()
    group = deepspeed.comm.new_group([0, 1])
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    deepspeed.comm.all_reduce(tensor, group=group)
    assert (tensor == 4).all()
    say("CALLS", sum(row["calls"] for row in log.rows()))


def stock_backend_over_us():
    """DeepSpeed's own backend on a process group of ours."""
    start()
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    tensor = torch.ones(4)
    deepspeed.comm.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    say("CARRIED", type(deepspeed.comm.comm.cdb).__name__, *carried())


def mistakes():
    """What a user does wrong is a sentence."""
    start()
    if dist.get_rank() == 0:
        dist.all_to_all_single(torch.empty(3), torch.empty(4))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
    say("ENDED")
