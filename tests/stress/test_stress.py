"""Random programs: any operation by any backend, on overlapping groups, waited for in an order of each rank's own."""

import os
import random
import time

import pytest
import torch

from deepspeed_mcrdl.config import CUTTABLE, FUSABLE
from deepspeed_mcrdl.operations import OPERATIONS, RECV, SEND
from tests.backends import BACKENDS
from tests.matrix.cells import DTYPES, SHAPES, UNEVEN, UNEVEN_FORMS, Cell, make, verify
from tests.programs import use

MOST_OUTSTANDING = 24
SEEDS = [int(seed) for seed in os.environ.get("MCRDL_STRESS_SEEDS", ",".join(map(str, range(20)))).split(",")]


def _cell(runtime, group, shared, salt):
    """Return a random call on a group that its backend can do."""
    fitting = {name: way for name, way in runtime.ways.items() if way.misfit(runtime.groups.of(group).mesh) is None}
    while True:
        operation = shared.choice(list(OPERATIONS))
        forms = [*SHAPES, *(UNEVEN_FORMS if operation in UNEVEN else ())]
        backend = shared.choice([*fitting, "auto"])
        op = shared.choice(["sum", "max", "product", "bxor", "avg"]) if OPERATIONS[operation].reduces else None
        dtype = shared.choice(DTYPES)
        cell = Cell(operation, backend, dtype, op, shared.choice(forms), shared.random() < 0.7, False, salt)
        tried = fitting.values() if backend == "auto" else [fitting[backend]]
        if any(type(b).lacks(OPERATIONS[operation], dtype, "cpu", op) is None for b in tried):
            return cell


def _random_program(seed, count, fusion=None, chunk=None):
    cdb = use({}, fusion=fusion, chunk=chunk)
    runtime, rank, n = cdb.runtime, cdb.get_rank(), cdb.get_world_size()
    shared, own = random.Random(seed), random.Random(f"{seed}/{rank}")
    everybody = list(range(n))
    groups = [(None, everybody)]
    for members in ([0, 1], everybody[1:], everybody[::2], everybody[::-1][:2][::-1], everybody):
        groups.append((cdb.new_group(members), members))
    outstanding = []

    def finish(place):
        work, cell, made = outstanding.pop(place)
        assert work.wait(), cell
        verify(cell, made)

    for step in range(count):
        seed_of_cell, (group, members) = shared.random(), shared.choice(groups)
        if rank not in members:
            continue
        cell = _cell(runtime, group, random.Random(seed_of_cell), step)
        made = make(cell, members, members.index(rank))
        if made.args is None:
            continue
        operation = OPERATIONS[cell.operation]
        if cell.operation in ("send", "recv"):
            operation = RECV if made.results else SEND
        work = runtime.issue(operation, group, made.args, cell.async_op, cell.backend)
        if work is None:
            verify(cell, made)
        else:
            outstanding.append((work, cell, made))
        while outstanding and (own.random() < 0.4 or len(outstanding) > MOST_OUTSTANDING):
            finish(own.randrange(len(outstanding)))
        if own.random() < 0.01:
            time.sleep(own.random() * 0.01)
    while outstanding:
        finish(own.randrange(len(outstanding)))
    cdb.barrier()
    for group, members in groups[1:]:
        if rank in members:
            cdb.destroy_process_group(group)
    assert runtime.progress.wait_until(lambda: not runtime.progress, timeout_s=10)


@pytest.mark.parametrize("seed", [1001, 1002])
@pytest.mark.parametrize(("world_size", "hosts"), [(2, ""), (4, ""), (4, "abba")])
def test_short_random_programs(ranks, world_size, hosts, seed):
    ranks(world_size, hosts).run(_random_program, seed, 500, timeout_s=120)


@pytest.mark.parametrize("fusion", [{"max_calls": 1}, {"max_calls": 3}, {"max_bytes": 100_000}])
@pytest.mark.parametrize(("world_size", "hosts"), [(2, ""), (4, "abba")])
def test_short_random_programs_with_fused_calls(ranks, world_size, hosts, fusion):
    fusion = {"operations": FUSABLE, **fusion}
    ranks(world_size, hosts).run(_random_program, 1003, 500, fusion, timeout_s=120)


@pytest.mark.parametrize("fusion", [None, {"operations": FUSABLE, "max_call_bytes": 2000}])
@pytest.mark.parametrize("max_bytes", [4096, 50_000])
@pytest.mark.parametrize(("world_size", "hosts"), [(2, ""), (4, "abba")])
def test_short_random_programs_in_chunks(ranks, world_size, hosts, max_bytes, fusion):
    chunk = {"operations": CUTTABLE, "max_bytes": max_bytes, "min_call_bytes": 0}
    ranks(world_size, hosts).run(_random_program, 1004, 500, fusion, chunk, timeout_s=120)


@pytest.mark.stress
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", SEEDS)
def test_long_random_programs(ranks, seed):
    fusion = {"operations": FUSABLE} if seed % 4 > 1 else None
    chunk = {"operations": CUTTABLE, "max_bytes": 10_000, "min_call_bytes": 0} if seed % 3 == 0 else None
    ranks(4, "abba" if seed % 4 == 3 else "").run(_random_program, seed, 10_000, fusion, chunk, timeout_s=1400)


def _groups_come_and_go(cycles):
    cdb = use({})
    seen = []
    for cycle in range(cycles):
        group = cdb.new_group(range(cdb.get_world_size()))
        tensor = torch.ones(4)
        cdb.runtime.issue(OPERATIONS["all_reduce"], group, (tensor, "sum"), backend=BACKENDS[cycle % len(BACKENDS)])
        assert (tensor == cdb.get_world_size()).all()
        cdb.destroy_process_group(group)
        if cycle in (cycles // 5, cycles - 1):
            from tests.faults.programs import resources

            seen.append(resources())
    return seen


@pytest.mark.parametrize("cycles", [100, pytest.param(1000, marks=pytest.mark.stress)])
def test_groups_that_come_and_go_leak_nothing(ranks, cycles):
    for early, late in ranks(2).run(_groups_come_and_go, cycles, timeout_s=280):
        assert late[0] <= early[0] + 1, "threads"
        assert late[1] <= early[1] + 4, "descriptors"
        assert late[2] <= early[2] + 20_000, "kilobytes"
