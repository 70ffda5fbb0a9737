import tracemalloc

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.errors import CallError
from tests.programs import face, use


def _repeated_calls():
    cdb = use({"default": "mpi"})
    tensor = torch.ones(1_000_000)
    cdb.all_reduce(tensor)
    routes = dict(cdb.runtime._routes)
    cdb.runtime.groups._store = None  # whoever asks the other ranks anything now fails
    cdb.runtime.router = None
    tracemalloc.start()
    for _ in range(50):
        cdb.all_reduce(tensor)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000
    assert cdb.runtime._routes == routes
    use({})


def test_a_repeated_call_decides_asks_and_allocates_nothing(ranks):
    ranks(2).run(_repeated_calls)


def _checked_at_every_call():
    cdb = use({"default": "mpi"})
    n = cdb.get_world_size()
    right = [torch.empty(2) for _ in range(n)]
    cdb.all_gather(right, torch.ones(2))
    uneven = [torch.empty(3 if r == cdb.get_rank() else 1) for r in range(n)]  # the same signature
    with pytest.raises(CallError, match="entry"):
        cdb.all_gather(uneven, torch.ones(2))
    cdb.all_to_all_single(torch.empty(2 * n), torch.ones(2 * n), [2] * n, [2] * n)
    with pytest.raises(CallError, match="split sizes"):
        cdb.all_to_all_single(torch.empty(2 * n), torch.ones(2 * n), [2] * n, [3] * n)


def test_lists_and_splits_are_checked_even_where_the_route_is_known(ranks):
    # MPI would write past the end of a buffer
    ranks(2).run(_checked_at_every_call)


def _new_groups():
    cdb = face()
    before = len(cdb.runtime.groups)
    for _ in range(20):
        group = cdb.new_group([0, 1])
        tensor = torch.ones(3)
        cdb.all_reduce(tensor, group=group)
        assert (tensor == 2).all()
        cdb.destroy_process_group(group)
    assert len(cdb.runtime.groups) == before
    assert all(route.group in set(cdb.runtime.groups) for route in cdb.runtime._routes.values())


def test_a_destroyed_group_leaves_nothing(ranks):
    ranks(2).run(_new_groups)


def _described():
    return use({"all_reduce": [{"max_bytes": 64, "backend": "mpi"}, {"backend": "gloo"}]}).runtime.describe()


def test_the_block_at_the_start_tells_backends_routes_and_groups(ranks):
    text = ranks(2).run(_described)[0]
    assert "2 ranks on 1 host" in text
    assert "backend mpi: MPICH" in text
    assert "left out nccl: " in text
    assert "route mpi: all_reduce up to 64 B" in text
    assert "reduce, broadcast, " in text
    assert "route gloo: all_reduce above 64 B" in text


def test_every_operation_of_the_catalogue_has_a_backend():
    from deepspeed_mcrdl.backends.c10d import GlooBackend
    from deepspeed_mcrdl.backends.mpi import MPIBackend
    from deepspeed_mcrdl.backends.shm import ShmBackend

    for backend in (ShmBackend, MPIBackend, GlooBackend):
        assert set(backend.operations()) == set(ops.OPERATIONS)
