"""Calls in chunks on real ranks: results, what is cut, priority, and programs whose ranks wait at different places."""

import itertools
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import CUTTABLE, parse
from deepspeed_mcrdl.errors import CallFailedError, ConfigError, MismatchError
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.operations import OPERATIONS
from deepspeed_mcrdl.routing.table import Fingerprint, Table
from deepspeed_mcrdl.transforms.chunk import _HOLD_S, BYTES
from tests.backends import BACKENDS, PAIRS
from tests.matrix.cells import DTYPES, SHAPES, UNEVEN_FORMS, Cell, make, verify
from tests.programs import face, sub_group, use

CHUNK = {"operations": CUTTABLE, "max_bytes": 4096, "min_call_bytes": 0}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"operations": ["broadcast"]}, 'calls of "broadcast" can\'t be cut'),
        ({"operations": ["all_reduec"]}, 'Did you mean "all_reduce"'),
        ({"max_byte": 9}, 'unknown key "max_byte".*"max_bytes"'),
        ({"max_bytes": 100}, "greater than or equal to 4096"),
        ({"min_call_bytes": -1}, "greater than or equal to 0"),
    ],
)
def test_a_wrong_block_is_named(block, text):
    with pytest.raises(ConfigError, match=text):
        parse({"chunk": block})


def _all_forms(backend):
    cdb = use({"default": backend}, chunk=CHUNK)
    rank, everybody = cdb.get_rank(), list(range(cdb.get_world_size()))
    part, members = sub_group()
    way = cdb.runtime.ways[backend]
    made, salt = [], 0
    forms = [*SHAPES, *UNEVEN_FORMS]
    for operation, dtype, form, sub in itertools.product(CUTTABLE, DTYPES, forms, (False, True)):
        if form in UNEVEN_FORMS and operation != "all_to_all_single":
            continue
        group, ranks_of = (part, members) if sub else (None, everybody)
        salt = 100 * (1 + salt // 100)
        if rank not in ranks_of or way.misfit(cdb.runtime.groups.of(group).mesh) is not None:
            continue
        for op in ("sum", "avg", "max", "product", "bxor") if OPERATIONS[operation].reduces else (None,):
            salt += 1
            if type(way).lacks(OPERATIONS[operation], dtype, "cpu", op) is None:
                cell = Cell(operation, backend, dtype, op, form, salt % 3 > 0, sub, salt)
                one = make(cell, ranks_of, ranks_of.index(rank))
                work = cdb.runtime.issue(OPERATIONS[operation], group, one.args, cell.async_op)
                made.append((cell, one, work))
    for place in random.Random(rank).sample(range(len(made)), len(made)):
        cell, one, work = made[place]
        if work is not None:
            work.wait()
        verify(cell, one)
    assert not cdb.runtime.progress
    lanes = cdb.runtime.chunks._lanes
    assert lanes
    assert all(lane.idle for lane in lanes)
    if rank in members:
        cdb.destroy_process_group(part)
    assert len(made)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_dtypes_operations_and_forms(ranks, world_size, backend):
    ranks(world_size).run(_all_forms, backend)


@pytest.mark.parametrize("backend", PAIRS)
@pytest.mark.parametrize("hosts", ["aabb", "abba"])
def test_all_dtypes_operations_and_forms_by_pairs(ranks, hosts, backend):
    ranks(4, hosts).run(_all_forms, backend)


def _splits(backend, seed):
    """Rows of many sizes, zero among them, so that the ranks need different numbers of chunks."""
    cdb = use({"default": backend}, chunk=CHUNK)
    rank, n = cdb.get_rank(), cdb.get_world_size()
    shared, works = random.Random(seed), []
    for _ in range(12):
        matrix = [[shared.choice([0, 0, 1, 7, 600, 9000]) for _ in range(n)] for _ in range(n)]
        given, taken = matrix[rank], [row[rank] for row in matrix]
        sent = torch.cat([torch.full((rows, 3), 10.0 * rank + place) for place, rows in enumerate(given)])
        wanted = torch.cat([torch.full((rows, 3), 10.0 * place + rank) for place, rows in enumerate(taken)])
        output = torch.zeros_like(wanted)
        works.append((cdb.all_to_all_single(output, sent, taken, given, async_op=True), output, wanted))
    for work, output, wanted in works[:: -1 if rank % 2 else 1]:
        work.wait()
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_sizes_that_no_rank_knows_all(ranks, backend):
    ranks(3).run(_splits, backend, 1)


@pytest.mark.parametrize("backend", PAIRS)
def test_split_sizes_by_pairs(ranks, backend):
    ranks(4, "abba").run(_splits, backend, 2)


def _same_bits(backend, op):
    results = []
    for chunk in (None, CHUNK):
        cdb = use({"default": backend}, chunk=chunk)
        generator = torch.Generator().manual_seed(cdb.get_rank())
        tensors = [
            torch.randn(size, generator=generator).to(dtype)
            for size in (1, 1025, 8191, 30_000)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ]
        for tensor in tensors:
            cdb.runtime.issue(ops.ALL_REDUCE, None, (tensor, op))
        results.append(tensors)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_two_ranks_and_two_by_two_get_the_bits_of_whole_calls(ranks, op):
    for backend in BACKENDS:
        ranks(2).run(_same_bits, backend, op)
    for backend in PAIRS:
        ranks(4, "aabb").run(_same_bits, backend, op)


def _in_checked_mode():
    cdb = use({"default": BACKENDS[0]}, chunk=CHUNK, checked=True)
    tensor = torch.ones(5000)
    cdb.all_reduce(tensor, async_op=True).wait()
    assert (tensor == 2).all()
    size = 4000 + 100 * cdb.get_rank()
    with pytest.raises(MismatchError, match="calls don't fit together"):
        cdb.all_reduce(torch.ones(size))


def test_checked_mode_compares_the_whole_calls(ranks):
    ranks(2).run(_in_checked_mode)


def _in_place():
    """An exchange whose output is its input is the caller's own risk on torch; here it is as with whole calls."""
    cdb = use({"default": BACKENDS[0]}, chunk=CHUNK)
    rank, n = cdb.get_rank(), cdb.get_world_size()
    tensor = torch.arange(n * 5000.0) + 100_000 * rank
    wanted = torch.cat([torch.arange(5000.0) + 5000 * rank + 100_000 * other for other in range(n)])
    cdb.all_to_all_single(tensor, tensor)
    assert torch.equal(tensor, wanted)
    leaf = torch.ones(9000, requires_grad=True)
    cdb.all_reduce(leaf)
    assert (leaf == n).all()


def test_tensors_that_overlap_or_require_gradients(ranks):
    ranks(3).run(_in_place)


class _Counted:
    """Counts the operations that a backend is given on each group."""

    def __init__(self, runtime):
        self.on_own, fit = [], runtime.chunks._fit

        def counted(backend, operation, group, args):
            self.on_own.append(operation.name)
            return fit(backend, operation, group, args)

        runtime.chunks._fit = counted


def _cut(chunk, sizes, routing=None):
    cdb = use(routing or {"default": BACKENDS[0]}, chunk=chunk)
    counted = _Counted(cdb.runtime)
    found = []
    for size in sizes:
        for operation in CUTTABLE:
            before = len(counted.on_own)
            tensor = torch.ones(size // 4)
            args = (tensor, "sum") if operation == "all_reduce" else (torch.empty_like(tensor), tensor, None, None)
            cdb.runtime.issue(OPERATIONS[operation], None, args)
            found.append(len(counted.on_own) - before)
    return found


@pytest.mark.parametrize(
    ("chunk", "sizes", "found"),
    [
        (CHUNK, [4096, 4104, 16384, 16392], [0, 0, 2, 2, 4, 4, 5, 5]),
        ({**CHUNK, "min_call_bytes": 9000}, [8192, 12288], [0, 0, 3, 3]),
        ({**CHUNK, "operations": ["all_reduce"]}, [8192], [2, 0]),
        ({}, [2 * BYTES], [0, 0]),  # nothing is known of this backend
    ],
)
def test_what_is_cut_into_how_many(ranks, chunk, sizes, found):
    assert ranks(2).run(_cut, chunk, sizes) == [found] * 2


@pytest.mark.skipif(not PAIRS, reason="no pair of backends is usable here")
def test_pairs_are_cut_by_default(ranks):
    assert ranks(4, "aabb").run(_cut, {}, [BYTES, 2 * BYTES], {"default": PAIRS[0]}) == [[0, 0, 2, 0]] * 4


def _by_table(path, bytes_of_chunk):
    """Let a table say how large chunks and buckets are, or that there are none; return what was done."""
    mesh = Mesh(nodes=1, ranks_per_node=2, stride=1)
    what = {"mesh": mesh, "max_bytes": bytes_of_chunk, "gain": 1}
    backend = BACKENDS[0]
    table = Table(
        made="today",
        how="by hand",
        fingerprint=Fingerprint.here({}),
        entries=(),
        buckets=({**what, "backend": backend},),
        chunks=tuple({**what, "backend": backend, "operation": operation} for operation in CUTTABLE),
    )
    if face().get_rank() == 0:  # whose table all use
        table.write(Path(path))
    more = {"tuning": {"table": path}, "fusion": {}, "chunk": {**CHUNK, "max_bytes": None}}
    cdb = use({"default": backend}, **more)
    counted = _Counted(cdb.runtime)
    cdb.all_reduce(torch.ones(4096))  # 16 KB, which is fused where fusion is on
    works = [cdb.all_reduce(torch.ones(4096), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    fused = cdb.runtime.fusion.operations
    large = torch.ones(32_768)
    cdb.all_reduce(large)
    assert (large == 2).all()
    use({})
    return fused, len(counted.on_own)


def test_the_table_says_how_large_chunks_and_buckets_are_or_that_there_are_none(ranks, tmp_path):
    path = str(tmp_path / "table.json")
    (fused, cut), _ = ranks(2).run(_by_table, path, 32_768)
    assert (fused, cut) == (3, 4)  # one call, then two buckets of two; 128 KB in chunks of 32 KB
    (fused, cut), _ = ranks(2).run(_by_table, path, None)
    assert (fused, cut) == (0, 0)


def test_off_by_default(ranks):
    assert ranks(2).run(_is_off) == [True] * 2


def _is_off():
    return use({}).runtime.chunks is None


def _first(backend):
    """While an all-to-all is under way no chunk of an all_reduce starts, until it is done or the time is up."""
    cdb = use({"default": backend}, chunk=CHUNK)
    runtime, rank = cdb.runtime, cdb.get_rank()
    counted = _Counted(runtime)
    mine, other = torch.ones(8192), torch.empty(8192)
    cdb.barrier()
    if rank == 0:
        exchange = cdb.all_to_all_single(other[:64], mine[:64], async_op=True)  # the other rank is not there yet
        began = time.monotonic()
        large = cdb.all_reduce(mine.clone(), async_op=True)
        held = not counted.on_own
        while not counted.on_own:
            large.is_completed()
        waited = time.monotonic() - began
        cdb.monitored_barrier(timeout=timedelta(seconds=20))
        exchange.wait()
        large.wait()
        return held, waited
    cdb.monitored_barrier(timeout=timedelta(seconds=20))
    cdb.all_to_all_single(other[:64], mine[:64])
    cdb.all_reduce(mine.clone())
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_all_to_all_goes_first_for_a_bounded_time(ranks, backend):
    held, waited = ranks(2).run(_first, backend)[0]
    assert held
    assert _HOLD_S / 2 < waited < _HOLD_S + 1


def _waits_before_it_issues(how):
    """One rank has both under way; the other one waits for the all_reduce before it issues the all-to-all."""
    cdb = use({"default": BACKENDS[0], "all_reduce": how, "all_to_all_single": how}, chunk=CHUNK)
    tensor, sent = torch.ones(50_000), torch.ones(50_000)
    output = torch.zeros(50_000)
    for _ in range(3):
        tensor.fill_(1)
        if cdb.get_rank() == 0:
            works = [cdb.all_reduce(tensor, async_op=True), cdb.all_to_all_single(output, sent, async_op=True)]
            for work in reversed(works):
                work.wait()
        else:
            cdb.all_reduce(tensor)
            cdb.all_to_all_single(output, sent)
        assert (tensor == 2).all()
        assert (output == 1).all()


def _message_between(how):
    cdb = use({"default": BACKENDS[0], "all_reduce": how}, chunk=CHUNK)
    tensor, message = torch.ones(50_000), torch.zeros(50_000)
    work = cdb.all_reduce(tensor, async_op=True)
    if cdb.get_rank() == 0:
        work.wait()
        cdb.send(message, 1)
    else:
        cdb.recv(message, 0)
        work.wait()
    assert (tensor == 2).all()


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("program", [_waits_before_it_issues, _message_between])
def test_a_program_that_is_legal_with_whole_calls_ends(ranks, program, how):
    ranks(2).run(program, how, timeout_s=30)


def _failing():
    """A chunk fails on all ranks: the calls end with the error, and later ones too."""
    cdb = use({"default": BACKENDS[0]}, chunk=CHUNK)
    runtime = cdb.runtime
    runtime.issue(ops.ALL_REDUCE, None, (torch.ones(5000), "sum"))
    cdb.barrier()
    backend = runtime.backends[BACKENDS[0]]
    for own in runtime.chunks.groups_of(backend, runtime.groups.world):
        backend.leave(own)
    texts = []
    for _ in range(2):
        with pytest.raises(CallFailedError) as info:
            cdb.all_reduce(torch.ones(10_000))
        texts.append(str(info.value))
    return texts


def test_an_error_of_a_chunk_is_that_of_the_call(ranks):
    for texts in ranks(2).run(_failing):
        assert all("all_reduce #" in text and "failed" in text for text in texts)
