"""oneCCL is right in every dtype and reduce operation that it declares, and groups don't wait for each other."""

from pathlib import Path

import pytest
import torch

from deepspeed_mcrdl import operations
from deepspeed_mcrdl.backends import oneccl
from deepspeed_mcrdl.backends.oneccl import OneCCLBackend
from tests import launcher
from tests.matrix.cells import DTYPES
from tests.programs import filled, sub_group, use

PROGRAMS = Path(__file__).parents[1] / "faults" / "programs.py"
REASON = OneCCLBackend.unusable()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(300)]

REDUCE = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: (
        torch.view_as_real(stack.sum(0)).div(len(stack)).view(stack.dtype).view(-1)
        if stack.is_complex()
        else stack.sum(0) / len(stack)
    ),
    "min": lambda stack: stack.min(0).values,
    "max": lambda stack: stack.max(0).values,
    "product": lambda stack: stack.prod(0),
}


def _declared():
    cdb = use({"default": "oneccl"})
    group, members = sub_group()
    rank, n = cdb.get_rank(), cdb.get_world_size()
    for torch_group, ranks in ((None, list(range(n))), (group, members)):
        if rank in ranks:
            for dtype in DTYPES:
                _moved(cdb, torch_group, ranks, dtype)
                for op in sorted(OneCCLBackend.reductions.get(dtype, ())):
                    _reduced(cdb, torch_group, ranks, dtype, op)
    if rank in members:
        cdb.destroy_process_group(group)


def _values(dtype, seed, count=13):
    return filled(count, torch.float32, seed).sub(2).to(dtype) if dtype is torch.bool else filled(count, dtype, seed)


def _same(got, wanted, *what):
    assert torch.equal(got.float(), wanted.to(got.dtype).float()), (what, got, wanted)


def _reduced(cdb, group, ranks, dtype, op):
    me, n = ranks.index(cdb.get_rank()), len(ranks)
    sent = [_values(dtype, seed, 13 * n) for seed in ranks]
    wanted = REDUCE[op](torch.stack([s if s.is_complex() else s.double() for s in sent]))
    if dtype is torch.bool:
        wanted = wanted.bool()
    compare = torch.view_as_real if dtype.is_complex else lambda tensor: tensor
    issue = cdb.runtime.issue

    tensor = sent[me].clone()
    issue(operations.ALL_REDUCE, group, (tensor, op))
    _same(compare(tensor), compare(wanted.to(dtype)), "all_reduce", dtype, op)
    tensor = sent[me].clone()
    issue(operations.REDUCE, group, (tensor, ranks[0], op))
    kept = wanted.to(dtype) if me == 0 else sent[me]
    _same(compare(tensor), compare(kept), "reduce", dtype, op)
    output, own = torch.empty(13, dtype=dtype), wanted.to(dtype).view(n, 13)[me]
    issue(operations.REDUCE_SCATTER_TENSOR, group, (output, sent[me], op))
    _same(compare(output), compare(own), "reduce_scatter_tensor", dtype, op)
    issue(operations.REDUCE_SCATTER, group, (output.zero_(), list(sent[me].view(n, 13)), op))
    _same(compare(output), compare(own), "reduce_scatter", dtype, op)


def _moved(cdb, group, ranks, dtype):
    me, n = ranks.index(cdb.get_rank()), len(ranks)
    sent = [_values(dtype if dtype.itemsize > 1 else torch.uint8, seed, 13 * n).to(dtype) for seed in ranks]
    compare = torch.view_as_real if dtype.is_complex else lambda tensor: tensor
    tensor = sent[me].clone()
    cdb.broadcast(tensor, ranks[-1], group)
    _same(compare(tensor), compare(sent[-1]), "broadcast", dtype)
    output = torch.empty(13 * n * n, dtype=dtype)
    cdb.all_gather_into_tensor(output, sent[me], group)
    _same(compare(output), compare(torch.cat(sent)), "all_gather_into_tensor", dtype)
    output = torch.empty(13 * n, dtype=dtype)
    cdb.all_to_all_single(output, sent[me], group=group)
    _same(compare(output), compare(torch.cat([s.view(n, 13)[me] for s in sent])), "all_to_all_single", dtype)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_declared_dtype_and_reduce_operation_is_right(ranks, world_size):
    ranks(world_size).run(_declared, timeout_s=200)


def _opposite_orders(large):
    cdb = use({"default": "oneccl"})
    rank, n = cdb.get_rank(), cdb.get_world_size()
    groups = [cdb.new_group(list(range(n))) for _ in range(3)]
    for number in range(20):
        tensors = [torch.full((large,), float(number + place)) for place in range(3)]
        order = range(3) if rank % 2 else reversed(range(3))
        works = {place: cdb.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order}
        for place in (1, 2, 0):
            works[place].wait()
        assert [t[-1].item() for t in tensors] == [n * (number + place) for place in range(3)]
    for group in groups:
        cdb.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_that_are_called_in_different_orders_do_not_wait_for_each_other(ranks, world_size):
    for large in (4, 300_000):
        ranks(world_size).run(_opposite_orders, large, timeout_s=120)


MIXED = """
import os, deepspeed, torch
from deepspeed.comm import comm
config = {"train_batch_size": 2, "comm_backend": "mcrdl",
          "mcrdl": {"banner": False, "routing": {"default": "mpi", "all_reduce": "oneccl"}}}
net = torch.nn.Linear(4, 4)
model, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)
for step in range(3):
    model.backward(model(torch.ones(1, 4)).square().mean())
    model.step()
works = [deepspeed.comm.all_reduce(torch.ones(200_000), async_op=True) for _ in range(4)]
tensor = torch.ones(3)
deepspeed.comm.broadcast(tensor, 0)
for work in works:
    work.wait()
routes = {f"{key[0]}:{route.backend}" for key, route in comm.cdb.runtime._routes.items()}
os.write(1, ("CARRIED " + " ".join(sorted(routes)) + "\\n").encode())
"""


def test_a_job_under_the_launcher_mixes_it_with_mpi(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(MIXED)
    run = launcher.deepspeed(script)
    assert run.status == 0, run.output
    for carried in run.lines("CARRIED "):
        assert "all_reduce:oneccl" in carried, run.output
        assert "broadcast:mpi" in carried, run.output


def test_the_settings_leave_the_users_alone(monkeypatch):
    monkeypatch.setenv("CCL_ATL_SHM", "0")
    assert "CCL_ATL_SHM" not in oneccl._settings(one_host=True)
    monkeypatch.delenv("CCL_ATL_SHM")
    assert oneccl._settings(one_host=True)["CCL_ATL_SHM"] == "1"


def test_a_setting_that_would_mix_up_calls_is_refused(monkeypatch):
    monkeypatch.setenv("CCL_WORKER_OFFLOAD", "0")
    assert "unset it" in OneCCLBackend.unusable()


def test_the_others_end_when_a_rank_is_killed():
    run = launcher.deepspeed(PROGRAMS, "killed", "oneccl", ranks=2, timeout_s=90)
    assert run.status != 0
    assert "UP 0" in run.output
