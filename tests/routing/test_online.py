"""Tuning in a running job: the same numbers, one choice on all ranks, a bounded number of calls, and no deadlock."""

import json
import random
import threading

import deepspeed.comm as dist
import pytest
import torch
from torch._C._distributed_c10d import HashStore

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.routing.online import Kind, Trial
from deepspeed_mcrdl.routing.router import Key
from deepspeed_mcrdl.routing.table import read_table
from deepspeed_mcrdl.runtime import current
from deepspeed_mcrdl.safety import Progress
from tests.backends import BACKENDS
from tests.programs import face, sub_group

TRIALS = 3
CALLS = len(BACKENDS) * (1 + TRIALS) + 3  # warm-up, trials and the verdict's lag


def tuning(output, **more):
    block = {"mode": "online", "table": None, "trials": TRIALS, "output": str(output), **more}
    face().restart(parse({"tuning": block, "banner": False}))
    return current()


class Carried:
    """Notes which backend carries each call."""

    def __init__(self):
        self.backends = []

    def timed(self, call, args, carry):
        self.backends.append(call.backend)
        return carry()


def _settle(output):
    runtime = tuning(output)
    carried = Carried()
    runtime.observe(carried)
    tensor = torch.arange(1000.0) / 7
    results = []
    for _ in range(CALLS + 5):
        reduced = tensor * (dist.get_rank() + 1)
        dist.all_reduce(reduced)
        results.append(reduced)
    runtime.ignore(carried)
    assert all(torch.equal(result, results[0]) for result in results), "the numbers depend on what is tried"
    return carried.backends, runtime._online.counts(), str(runtime.groups.world.mesh)


def test_all_ranks_try_the_same_and_keep_the_same(ranks, tmp_path):
    first, second = ranks(2).run(_settle, tmp_path / "t.json")
    assert first == second
    backends, counts, mesh = first
    trials = backends[len(BACKENDS) : len(BACKENDS) * (1 + TRIALS)]
    assert sorted(trials) == sorted(BACKENDS * TRIALS)
    assert len(set(backends[CALLS - 1 :])) == 1
    assert counts == (1, 1)
    table = read_table(tmp_path / "t.json")
    (entry,) = table.entries
    assert (entry.operation, entry.dtype, str(entry.mesh)) == ("all_reduce", "float", mesh)
    assert entry.steps[0].backend == backends[-1]
    assert {measured.backend for measured in entry.measured} == set(BACKENDS)


def _from_a_table(output):
    runtime = tuning(output)
    for _ in range(CALLS):
        dist.all_reduce(torch.ones(1000))
    path = str(output)
    tuning(output, table=path)
    runtime = current()
    key = Key(ops.ALL_REDUCE, "world", torch.float32, "cpu", "sum", 4000, runtime.groups.world.mesh)
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0)
    return runtime.router.decide(key).why, runtime._online.counts()


def test_the_next_job_starts_from_what_was_learned(ranks, tmp_path):
    why, counts = ranks(2).run(_from_a_table, tmp_path / "t.json")[0]
    assert why.startswith("table, ")
    assert counts == (0, 1)  # the broadcast is new, the all_reduce is known


def _asynchronously_ahead(output):
    """Rank 0 starts all its calls, and with them the whole tuning, before rank 1 makes its first."""
    tuning(output)
    rank = dist.get_rank()
    tensors = [torch.full((100,), float(rank + place)) for place in range(3 * CALLS)]
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank == 0:
        dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    assert all((tensor == 2 * place + 1).all() for place, tensor in enumerate(tensors))
    for _ in range(300):  # the verdict comes at a later call
        dist.all_reduce(torch.ones(100))
    return current()._online.counts()


def test_a_rank_that_is_far_ahead_is_not_held_up(ranks, tmp_path):
    assert ranks(2).run(_asynchronously_ahead, tmp_path / "t.json") == [(1, 1)] * 2


def _groups_and_threads(output):
    tuning(output)
    group, members = sub_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    errors = []

    def calls(torch_group, size):
        try:
            for _ in range(2 * CALLS):
                tensor = torch.ones(100)
                mcrdl.all_reduce(tensor, group=torch_group)
                assert (tensor == size).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(None, n))]
    if rank in members:
        threads.append(threading.Thread(target=calls, args=(group, len(members))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    outputs = [torch.empty(8) for _ in range(n)]
    for _ in range(CALLS):  # a kind whose size is not known to all
        mcrdl.all_to_all(outputs, [torch.full((8,), float(rank))] * n)
        assert all((outputs[index] == index).all() for index in range(n))
    return current()._online.counts()


def test_groups_are_tuned_apart_and_from_any_thread(ranks, tmp_path):
    found = ranks(3).run(_groups_and_threads, tmp_path / "t.json")
    assert found == [(2, 2), (3, 3), (3, 3)]


def _again(output):
    runtime = tuning(output, retune_every=10)
    carried = Carried()
    runtime.observe(carried)
    for _ in range(2 * (CALLS + 10)):
        dist.all_reduce(torch.ones(100))
    runtime.ignore(carried)
    return carried.backends


def test_it_tries_again_for_jobs_that_drift(ranks, tmp_path):
    first, second = ranks(2).run(_again, tmp_path / "t.json")
    assert first == second
    for start in (0, CALLS - 1 + 10):
        assert set(first[start : start + CALLS - 3]) == set(BACKENDS)
    assert len(set(first[CALLS - 1 : CALLS - 1 + 10])) == 1


def _pinned(output):
    block = {"mode": "online", "table": None, "output": str(output)}
    face().restart(parse({"tuning": block, "routing": {"all_reduce": "gloo"}, "banner": False}))
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
        mcrdl.broadcast(torch.ones(10), 0, backend="mpi")
        if dist.get_rank() < 2:
            (dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(4), 1 - dist.get_rank())
    return current()._online.counts()


def test_what_the_user_has_chosen_and_messages_are_not_tried(ranks, tmp_path):
    assert ranks(2).run(_pinned, tmp_path / "t.json") == [(0, 0)] * 2


@pytest.mark.parametrize("operation", [ops.ALL_REDUCE, ops.BROADCAST])
def test_waiting_for_a_late_rank_is_no_backends_fault(operation):
    # Ranks come milliseconds apart, and a backend takes microseconds.
    store, progress, chance = HashStore(), Progress(5.0), random.Random(1)
    key = Key(operation, "world", torch.float32, "cpu", "sum", 4000)
    verdicts = []
    trials = [
        Trial(
            Kind.of(key),
            Group((0, 1), rank, "world", 0, key.mesh, None),
            ["slow", "fast"],
            TRIALS,
            None,
            store,
            progress,
            lambda trial, verdict: verdicts.append(verdict),
        )
        for rank in range(2)
    ]
    while not trials[0].over:
        (name, *_), (same, *_) = told = [trial.next() for trial in trials]
        assert name == same
        late = chance.randrange(2)
        for rank, (_, report) in enumerate(told):
            if report is not None:
                waits = 0.0 if rank == late or operation.rooted else chance.uniform(1e-3, 9e-3)
                leaves_early = operation.rooted and rank == 0
                report(1e-6 if leaves_early else waits + {"slow": 50e-6, "fast": 10e-6}[name])
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].backend == "fast"
    assert verdicts[0].medians_us == pytest.approx({"slow": 50, "fast": 10})


def _record(path):
    face().restart(parse({"tuning": {"record": str(path), "table": None}, "banner": False}))
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    dist.barrier()
    face().restart(parse({"banner": False}))


def test_a_job_can_record_its_calls(ranks, tmp_path):
    ranks(2).run(_record, tmp_path / "calls.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [(row["operation"], row["bytes"], row["calls"]) for row in rows] == [
        ("all_reduce", 40, 3),
        ("barrier", 0, 1),
    ]


@pytest.mark.parametrize(
    ("block", "text"),
    [({"mode": "onlin"}, "'off' or 'online'"), ({"trial": 3}, 'Did you mean "trials"'), ({"trials": 0}, "greater")],
)
def test_a_wrong_key_is_named(block, text):
    from deepspeed_mcrdl.errors import ConfigError

    with pytest.raises(ConfigError, match="mcrdl.tuning.*" + text):
        parse({"tuning": block})
