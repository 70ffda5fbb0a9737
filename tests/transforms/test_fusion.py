"""Fused calls on real ranks: results, buckets, and programs whose ranks wait for each other at different places."""

import itertools
import random
import time
from datetime import timedelta

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import FUSABLE, parse
from deepspeed_mcrdl.errors import CallFailedError, ConfigError
from deepspeed_mcrdl.faces import api
from deepspeed_mcrdl.operations import OPERATIONS
from tests.backends import BACKENDS, PAIRS
from tests.matrix.cells import DTYPES, SHAPES, Cell, make, verify
from tests.programs import face, sub_group, use

ALL = {"operations": FUSABLE}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"operations": ["barrier"]}, 'calls of "barrier" can\'t be fused'),
        ({"operations": ["all_reduec"]}, 'Did you mean "all_reduce"'),
        ({"max_byte": 9}, 'unknown key "max_byte".*"max_bytes"'),
        ({"max_bytes": 100}, "does not fit"),
    ],
)
def test_a_wrong_block_is_named(block, text):
    with pytest.raises(ConfigError, match=text):
        parse({"fusion": block})


def _all_forms(backend):
    cdb = use({"default": backend}, fusion=ALL)
    rank, everybody = cdb.get_rank(), list(range(cdb.get_world_size()))
    made = []
    for operation, dtype, form in itertools.product(FUSABLE, DTYPES, SHAPES):
        for op in ("sum", "avg", "max", "product", "bxor") if OPERATIONS[operation].reduces else (None,):
            if type(cdb.runtime.backends[backend]).lacks(OPERATIONS[operation], dtype, "cpu", op) is None:
                cell = Cell(operation, backend, dtype, op, form, True, False, len(made))
                made.append((cell, make(cell, everybody, rank)))
    works = [cdb.runtime.issue(OPERATIONS[cell.operation], None, one.args, True) for cell, one in made]
    order = random.Random(rank).sample(range(len(made)), len(made))
    for place in order:
        works[place].wait()
        verify(*made[place])
    assert not cdb.runtime.progress
    return len(made), cdb.runtime.fusion.operations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_dtypes_operations_and_forms(ranks, world_size, backend):
    for calls, operations in ranks(world_size).run(_all_forms, backend):
        assert operations < calls / 1.5  # there are many kinds of them


def _same_bits(backend, op):
    results = []
    for fusion in (None, {}):
        cdb = use({"default": backend}, fusion=fusion)
        generator = torch.Generator().manual_seed(cdb.get_rank())
        tensors = [
            torch.randn(size, generator=generator).to(dtype)
            for size in (1, 3, 1000, 8191)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ]
        works = [cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, op), True) for tensor in tensors]
        for work in works:
            work.wait()
        results.append(tensors)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_get_the_bits_of_calls_alone(ranks, backend):
    ranks(2).run(_same_bits, backend, "sum")
    ranks(2).run(_same_bits, backend, "avg")


def _buckets(fusion, sizes, by_api=False):
    """Return how many operations carry all_reduces of `sizes` elements that are waited for at the end."""
    cdb = use({"default": BACKENDS[0]}, fusion=fusion)
    tensors = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    if by_api:
        for tensor in tensors:
            api.all_reduce(tensor, async_op=True)
        api.synchronize()
    else:
        for work in [cdb.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
    n = cdb.get_world_size()
    assert all((tensor == n * place).all() for place, tensor in enumerate(tensors))
    return cdb.runtime.fusion.operations


@pytest.mark.parametrize(
    ("fusion", "sizes", "operations"),
    [
        ({}, [1024] * 256, 1),
        ({}, [1024] * 257, 2),
        ({"max_calls": 4}, [1] * 10, 3),
        ({"max_calls": 1}, [1] * 5, 5),
        ({"max_bytes": 4096, "max_call_bytes": 4096}, [1024, 1023, 1, 1, 1023, 1], 4),
        ({"max_call_bytes": 4000}, [1000, 1001, 1000], 1),
        ({"max_call_bytes": 0}, [1, 0, 1], 0),
    ],
)
def test_a_full_bucket_is_sent(ranks, fusion, sizes, operations):
    assert ranks(2).run(_buckets, fusion, sizes) == [operations] * 2


def test_the_papers_interface_does_not_cut_buckets(ranks):
    assert ranks(2).run(_buckets, {"max_calls": 1000}, [8] * 300, True) == [1] * 2


def test_off_by_default(ranks):
    assert ranks(2).run(_is_off) == [True] * 2


def _is_off():
    return use({}).runtime.fusion is None


def _early_on_one_rank(how):
    """One rank waits for its call while the other one waits for a message that is sent after that."""
    cdb = use({"default": BACKENDS[0], "all_reduce": how}, fusion={})
    tensors = [torch.full((100,), float(place)) for place in range(4)]
    works = [cdb.all_reduce(tensor, async_op=True) for tensor in tensors]
    message = torch.zeros(1)
    if cdb.get_rank() == 0:
        works[2].wait()
        cdb.send(message, 1)
    else:
        cdb.recv(message, 0)
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [2.0 * place for place in range(4)]


def _polls_a_message(how):
    cdb = use({"default": BACKENDS[0], "all_reduce": how}, fusion={})
    tensor, message = torch.ones(100), torch.zeros(1)
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == 0:
        work.wait()
        cdb.send(message, 1)
    else:
        received = cdb.irecv(message, 0)
        while not received.is_completed():
            pass
    while not work.is_completed():
        pass
    assert (tensor == 2).all()


def _blocking_meets_asynchronous(how):
    cdb = use({"default": BACKENDS[0], "all_reduce": how}, fusion={})
    first, second = torch.ones(100), torch.ones(5)
    if cdb.get_rank() == 0:
        cdb.all_reduce(first)
        cdb.all_reduce(second)
    else:
        works = [cdb.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        works[1].wait()
        works[0].wait()
    assert (first == 2).all()
    assert (second == 2).all()


def _waits_by_other_means(how):
    cdb = use({"default": BACKENDS[0], "all_reduce": how}, fusion={})
    tensor = torch.ones(100)
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == 0:
        work.wait()
        cdb.monitored_barrier(timeout=timedelta(seconds=20))
    else:
        cdb.monitored_barrier(timeout=timedelta(seconds=20))
        work.wait()
    other = cdb.all_reduce(torch.ones(3), async_op=True)
    if cdb.get_rank() == 0:
        other.wait()
        cdb.barrier()
    else:
        cdb.barrier()
        other.wait()


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize(
    "program",
    [
        _early_on_one_rank,
        _polls_a_message,
        _blocking_meets_asynchronous,
        _waits_by_other_means,
    ],
)
def test_a_program_that_is_legal_without_fusion_ends(ranks, program, how):
    ranks(2).run(program, how, timeout_s=30)


def _random_waits(seed, count):
    """Small calls of several kinds by several backends, on the world and a part, beside barriers and large calls."""
    shared, own = random.Random(seed), random.Random(f"{seed}/{face().get_rank()}")
    limits = {"max_calls": shared.choice([2, 5, 1000]), "max_bytes": shared.choice([2**16, 2**20])}
    cdb = use({"barrier": "gloo"}, fusion={**ALL, **limits})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    part, members = sub_group()
    waiting = []
    for number in range(count):
        group, ranks_of = shared.choice([(None, list(range(n))), (part, members)])
        what, size, backend = shared.choice(FUSABLE), shared.choice([0, 1, 33, 5000, 20_000]), shared.choice(BACKENDS)
        dtype, op, root = shared.choice([torch.float32, torch.int64]), shared.choice(["sum", "max"]), ranks_of[-1]
        blocking, barrier = shared.random() < 0.1, shared.random() < 0.1
        if rank not in ranks_of:
            continue
        tensor = torch.full((size,), 1 + rank + number, dtype=dtype)
        mine = torch.full((size,), 1 + rank + number, dtype=dtype)
        if what == "all_gather_into_tensor":
            output = torch.empty(size * len(ranks_of), dtype=dtype)
            args, tensor = (output, tensor), output
            wanted = torch.cat([mine - rank + other for other in ranks_of])
        elif what == "broadcast":
            args, wanted = (tensor, root), mine - rank + root
        else:
            args = (tensor, op) if what == "all_reduce" else (tensor, root, op)
            values = [1 + other + number for other in ranks_of]
            wanted = torch.full_like(mine, sum(values) if op == "sum" else max(values))
            if what == "reduce" and rank != root:
                wanted = None
        work = cdb.runtime.issue(OPERATIONS[what], group, args, not blocking, backend)
        waiting.append((work, tensor, wanted))
        if barrier:
            cdb.barrier(group=group)
        while waiting and own.random() < 0.3:
            _check(waiting.pop(own.randrange(len(waiting))), own)
        if own.random() < 0.02:
            time.sleep(own.random() * 0.01)
    while waiting:
        _check(waiting.pop(own.randrange(len(waiting))), own)
    cdb.barrier()
    if rank in members:
        cdb.destroy_process_group(part)
    assert not cdb.runtime.progress


def _check(one, own):
    work, tensor, wanted = one
    if work is not None and own.random() < 0.2:
        while not work.is_completed():
            pass
    elif work is not None:
        work.wait()
    assert wanted is None or torch.equal(tensor, wanted)


def _two_pairs():
    """Two pairs that share the backend within hosts: each rank sends their lanes in an order of its own."""
    cdb = use({}, fusion={})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    for number in range(100):
        tensors = [torch.full((9,), float(rank + number)) for _ in PAIRS]
        works = [
            cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, "sum"), True, pair)
            for tensor, pair in zip(tensors, PAIRS, strict=True)
        ]
        for pair in PAIRS[:: -1 if (rank + number) % 2 else 1]:
            cdb.runtime.fusion._lane(cdb.runtime.ways[pair], cdb.runtime.groups.world).send()
        for work in works:
            work.wait()
        assert all((tensor == sum(range(n)) + n * number).all() for tensor in tensors)


@pytest.mark.skipif(len(PAIRS) < 2, reason="fewer than two pairs of backends are usable here")
def test_lanes_of_pairs_that_share_a_backend_are_apart(ranks):
    ranks(4, "aabb").run(_two_pairs, timeout_s=60)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs(ranks, world_size, seed):
    ranks(world_size).run(_random_waits, seed, 300, timeout_s=60)


def _failing():
    """The carrying operation fails on all ranks: each call ends with the error in its own name, and later ones too."""
    cdb = use({"default": BACKENDS[0]}, fusion={})
    cdb.barrier()
    works = [cdb.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
    runtime = cdb.runtime
    backend = runtime.backends[BACKENDS[0]]
    backend.leave(runtime.fusion.group_of(backend, runtime.groups.world))
    texts = []
    for work in works:
        with pytest.raises(CallFailedError) as info:
            work.wait()
        texts.append(str(info.value))
    with pytest.raises(CallFailedError) as info:
        cdb.all_reduce(torch.ones(10), async_op=True)
    return [*texts, str(info.value)]


def test_an_error_is_raised_by_every_call_in_its_own_name(ranks):
    for texts in ranks(2).run(_failing):
        numbers = [text.partition("all_reduce #")[2].partition(" ")[0] for text in texts]
        assert [int(number) - int(numbers[0]) for number in numbers] == [0, 1, 2]
        assert all("failed" in text for text in texts)
