"""Pairs of backends on emulated hosts; what each operation gives is in tests/matrix and tests/stress."""

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.backends.base import installed
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import MCRDLError
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.routing.table import Entry, Fingerprint, Lookup, Table
from deepspeed_mcrdl.transforms.hierarchical import pairs
from tests.backends import PAIRS
from tests.programs import face, use

needs_pairs = pytest.mark.skipif(not PAIRS, reason="no pair of backends is usable here")
TWO_BY_TWO = Mesh(nodes=2, ranks_per_node=2, stride=1)


def test_a_pair_is_of_a_backend_for_one_host_or_gpus_and_one_that_is_neither():
    made = pairs(installed())
    assert {"shm+mpi", "shm+gloo", "nccl+mpi", "nccl+gloo"} <= made.keys()
    assert not {"mpi+gloo", "mpi+shm", "shm+nccl", "shm+shm"} & made.keys()


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        (TWO_BY_TWO, "shm+mpi"),
        (Mesh(nodes=1, ranks_per_node=4, stride=1), "shm"),
        (Mesh(nodes=4, ranks_per_node=1, stride=2), "mpi"),
        (Mesh(nodes=2, ranks_per_node=0, stride=1), "mpi"),
    ],
)
def test_a_pair_carries_what_spans_hosts_evenly(mesh, backend):
    classes = {name: cls for name, cls in installed().items() if name in ("shm", "mpi", "gloo")}
    router = Router(parse({"routing": {"default": "shm+mpi"}}).routing, {**classes, **pairs(classes)})
    assert router.decide(Key(ops.ALL_REDUCE, "world", torch.float32, "cpu", "sum", 100, mesh)).backend == backend
    assert router.decide(Key(ops.SEND, "world", torch.float32, "cpu", None, 100, mesh)).backend != "shm+mpi"


def test_without_a_word_of_table_or_rule_no_pair_is_taken():
    classes = {name: cls for name, cls in installed().items() if name in ("shm", "mpi", "gloo")}
    ways = {**classes, **pairs(classes)}
    key = Key(ops.ALL_REDUCE, "world", torch.float32, "cpu", "sum", 100, TWO_BY_TWO)
    assert Router(parse({}).routing, ways).decide(key).backend == "mpi"
    entry = Entry(
        operation="all_reduce",
        dtype="float",
        device="cpu",
        mesh=TWO_BY_TWO,
        steps=({"max_bytes": 50, "backend": "gloo"}, {"backend": "shm+gloo"}),
        unsized="shm+gloo",
    )
    fingerprint = Fingerprint(cpu="any", cores=1, backends={})
    table = Table(made="today", how="by hand", fingerprint=fingerprint, entries=(entry,))
    assert Router(parse({}).routing, ways, Lookup(table)).decide(key).backend == "shm+gloo"


def _restart(config):
    try:
        face().restart(parse({"banner": False, **config}))
    except MCRDLError as error:
        return str(error)
    finally:
        face().restart(parse({"banner": False}))


@needs_pairs
def test_a_pair_that_is_none_is_an_error_on_all(ranks):
    (error, *others) = ranks(2).run(_restart, {"routing": {"all_reduce": "mpi+shm"}})
    assert set(others) == {error}
    assert 'unknown pair of backends "mpi+shm"' in error
    assert "shm+mpi" in error
    assert (
        'unknown backend "mpl". Did you mean "mpi"?'
        in ranks(2).run(_restart, {"routing": {"all_reduce": "shm+mpl"}})[0]
    )


def _many_at_once(first, second):
    """Calls of two pairs under way at once, waited for in an order of each rank's own, with blocking ones between."""
    cdb = use({})
    runtime, rank, n = cdb.runtime, cdb.get_rank(), cdb.get_world_size()
    rounds = 40
    works = []
    for number in range(rounds):
        pair = (first, second)[number % 3 % 2]
        size = (1, 1000, 30_001)[number % 3]
        if number % 2:
            tensor = torch.full((size,), float(rank + number))
            wanted = torch.full((size,), float(sum(range(n)) + n * number))
            works.append((runtime.issue(ops.ALL_REDUCE, None, (tensor, "sum"), True, pair), tensor, wanted))
        else:
            rows = [(rank + other + number) % 3 * size for other in range(n)]
            received = [(rank + other + number) % 3 * size for other in range(n)]
            tensor = torch.empty(sum(received))
            sent = torch.cat([torch.full((count,), float(10 * rank + place)) for place, count in enumerate(rows)])
            wanted = torch.cat([torch.full((count,), 10.0 * place + rank) for place, count in enumerate(received)])
            arguments = (tensor, sent, received, rows)
            works.append((runtime.issue(ops.ALL_TO_ALL_SINGLE, None, arguments, True, pair), tensor, wanted))
        if number % 10 == rank:
            cdb.barrier()
            for _ in range(n - 1):
                cdb.barrier()
        elif number % 10 < n:
            for _ in range(n):
                cdb.barrier()
    for work, tensor, wanted in works[:: -1 if rank % 2 else 1]:
        work.wait()
        assert torch.equal(tensor, wanted)


@needs_pairs
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_calls_of_two_pairs_under_way_at_once(ranks, hosts):
    ranks(4, hosts).run(_many_at_once, PAIRS[0], PAIRS[-1])


def _averages():
    cdb = use({})
    tensor = torch.full((5,), float(cdb.get_rank()), dtype=torch.bfloat16)
    cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, "avg"), backend=PAIRS[0])
    return tensor.tolist()


@needs_pairs
def test_an_average_is_over_all_ranks(ranks):
    assert ranks(4, "aabb").run(_averages) == [[1.5] * 5] * 4


def _groups_come_and_go():
    cdb = use({})
    for pair in PAIRS * 10:
        group = cdb.new_group(range(cdb.get_world_size()))
        tensor = torch.ones(9)
        cdb.runtime.issue(ops.ALL_REDUCE, group, (tensor, "sum"), backend=pair)
        assert tensor.tolist() == [4.0] * 9
        cdb.destroy_process_group(group)
    ways = [cdb.runtime.ways[pair] for pair in PAIRS]
    return [(len(way._layouts._found), len(way._layouts._joined)) for way in ways]


@needs_pairs
def test_groups_that_come_and_go_leave_nothing(ranks):
    parts = 2 + len({pair.partition("+")[2] for pair in PAIRS})  # of the world: twice within its host, and between
    assert ranks(4, "aabb").run(_groups_come_and_go) == [[(1, parts)] * len(PAIRS)] * 4


def _large_gathers():
    """Gathers of blocks that go straight to their places, also from a view of the output, as ZeRO does."""
    cdb = use({})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    for pair in PAIRS:
        for in_place in (False, True):
            works, size = [], 40_000
            for number in range(3):
                output = torch.empty(n * size)
                own = output[rank * size :][:size] if in_place else torch.empty(size)
                own.fill_(10 * number + rank)
                works.append((cdb.runtime.issue(ops.ALL_GATHER_INTO_TENSOR, None, (output, own), True, pair), output))
            for number, (work, output) in enumerate(works):
                work.wait()
                assert output.view(n, size).unique(dim=1).view(-1).tolist() == [10.0 * number + r for r in range(n)]


@needs_pairs
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_large_blocks_are_gathered(ranks, hosts):
    ranks(4, hosts).run(_large_gathers)
