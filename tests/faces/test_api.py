"""The paper's interface: deepspeed_mcrdl.init, a backend named in each call, synchronize."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.errors import UnsupportedError
from deepspeed_mcrdl.faces import api
from tests.backends import BACKENDS
from tests.programs import use


def _named_backends():
    use({"default": "gloo"})
    n, rank = mcrdl.get_world_size(), mcrdl.get_rank()
    assert mcrdl.get_backends() == list(BACKENDS)
    for backend in (*BACKENDS, "auto"):
        tensor = torch.ones(4)
        assert mcrdl.all_reduce(tensor, backend=backend) is None
        assert (tensor == n).all()
    routes = mcrdl.faces.api._runtime()._routes
    assert {(key[2], route.backend) for key, route in routes.items()} == {
        *((name, name) for name in BACKENDS),
        ("auto", "gloo"),
    }
    with pytest.raises(UnsupportedError, match=r'backend mpl is not in use\. Did you mean "mpi"'):
        mcrdl.all_reduce(torch.ones(4), backend="mpl")
    with pytest.raises(UnsupportedError, match=r"backend gloo has no sum of torch\.int16"):
        mcrdl.all_reduce(torch.ones(4, dtype=torch.int16), backend="gloo")
    with pytest.raises(UnsupportedError, match="reduce operation summ is not known"):
        mcrdl.all_reduce(torch.ones(4), "summ")

    started = [torch.full((100,), float(rank)) for _ in range(200)]
    for place, tensor in enumerate(started):
        mcrdl.all_reduce(tensor, "max", async_op=True, backend=BACKENDS[place % len(BACKENDS)])
    mcrdl.synchronize()
    assert all((tensor == n - 1).all() for tensor in started)
    assert not api._outstanding


def test_a_backend_is_named_in_each_call(ranks):
    ranks(2).run(_named_backends)


def _vector_forms():
    use({})
    n, rank = mcrdl.get_world_size(), mcrdl.get_rank()
    for backend in BACKENDS:
        own = torch.full((rank + 1,), float(rank))
        parts = [torch.empty(r + 1) for r in range(n)]
        mcrdl.all_gatherv(parts, own, backend=backend)
        assert [part[0].item() for part in parts] == list(range(n))
        at_root = [torch.empty(r + 1) for r in range(n)] if rank == 0 else None
        mcrdl.gatherv(own, at_root, 0, backend=backend)
        assert at_root is None or [part[0].item() for part in at_root] == list(range(n))
        received = torch.empty(rank + 1)
        mcrdl.scatterv(received, parts if rank == n - 1 else None, n - 1, backend=backend)
        assert (received == rank).all()
        rows = [r + rank for r in range(n)]
        output = torch.empty(sum(rows))
        mcrdl.all_to_allv(output, torch.full((sum(rows),), float(rank)), rows, rows, backend=backend)
        assert output.tolist() == [float(r) for r in range(n) for _ in range(r + rank)]


def test_the_vector_forms_of_the_paper(ranks):
    ranks(3).run(_vector_forms)


def _composed():
    use({})
    n, rank = mcrdl.get_world_size(), mcrdl.get_rank()
    for backend in BACKENDS:
        several = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)]
        mcrdl.all_reduce_coalesced(several, backend=backend)  # pytorch 35671: several dtypes in one call
        assert all((tensor == n).all() for tensor in several)
        outputs = [torch.empty(n), torch.empty(2 * n)]
        mcrdl.all_gather_coalesced(outputs, [torch.ones(1), torch.ones(2)], async_op=True, backend=backend)
        halves = [torch.empty(1), torch.empty(2)]
        mcrdl.reduce_scatter_coalesced(halves, [torch.ones(n), torch.ones(2 * n)], async_op=True, backend=backend)
        mcrdl.synchronize()
        assert all((tensor == 1).all() for tensor in outputs)
        assert all((tensor == n).all() for tensor in halves)
        peer = (rank + 1) % n
        into = torch.empty(2)
        mcrdl.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, into, (rank - 1) % n)], backend
        )
        mcrdl.synchronize()
        assert (into == 1).all()
        everything = [None] * n
        mcrdl.all_gather_object(everything, "x" * rank, backend=backend)
        assert everything == ["x" * r for r in range(n)]
        gathered = [None] * n if rank == 1 else None
        mcrdl.gather_object({"rank": rank}, gathered, 1, backend=backend)
        assert gathered is None or [g["rank"] for g in gathered] == list(range(n))
        received = [None]
        mcrdl.scatter_object_list(received, list(range(n)) if rank == 1 else None, 1, backend=backend)
        assert received == [rank]
        objects = [rank, "b"]
        mcrdl.broadcast_object_list(objects, 1, backend=backend)
        assert objects == [1, "b"]
    if rank == 0:
        mcrdl.send(torch.ones(2), 1, tag=3)
    elif rank == 1:
        assert mcrdl.recv(into, tag=3) == 0
    mcrdl.barrier()
    mcrdl.monitored_barrier()


def test_coalesced_calls_messages_and_objects(ranks):
    ranks(2).run(_composed)


def test_every_public_call_takes_a_backend():
    not_calls = {"init", "finalize", "synchronize", "is_initialized", "get_backends", "get_rank", "get_world_size"}
    not_calls |= {
        "end_step",
        "new_group",
        "destroy_group",
        "monitored_barrier",
        "log_summary",
        "log_reset",
        "log_step",
        "log_stragglers",
    }
    for name in set(api.__all__) - not_calls:
        assert inspect.signature(getattr(mcrdl, name)).parameters["backend"].default == "auto", name


def test_one_process_is_a_job_too():
    code = (
        "import torch, deepspeed_mcrdl as m\n"
        "m.init(); t = torch.ones(2); m.all_reduce(t); m.all_to_all_single(t + 0, t)\n"
        "print(t.tolist(), m.get_world_size()); m.finalize(); m.finalize()\n"
        "try: m.all_reduce(t)\nexcept RuntimeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines() == [
        "[1.0, 1.0] 1",
        "communication is not up: call deepspeed_mcrdl.init() first",
    ], run.stderr
