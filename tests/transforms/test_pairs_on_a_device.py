"""Pairs of backends with tensors of a device, on a simulated one. In host memory on real ranks: test_hierarchical."""

import random

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.groups import Groups
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.transforms import hierarchical
from deepspeed_mcrdl.transforms.hierarchical import Hierarchical, Layouts
from deepspeed_mcrdl.transforms.staging import through_host
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import DONE, Pending, Work
from tests.transforms.programs import HostCall
from tests.transforms.simulated import Kernels, Simulation

HOSTS = {"in order": "aabb", "out of order": "abab"}
BLOCK = 3


def written(operation, args):
    """Return (output, (function, input)): what a step writes where the other rank of its group does as this one, the
    first."""
    name = operation.name
    if name == "all_reduce":
        return [(args[0], (lambda value: value * 2, args[0]))]
    if name == "broadcast":
        return [(args[0], (lambda value: value * 1, args[0]))]
    if name == "reduce_scatter_tensor":
        return [(args[0].view(-1), (lambda value: value.view(2, -1)[0] * 2, args[1]))]
    if name == "reduce_scatter":
        return [(args[0], (lambda value: value.view_as(args[0]) * 2, args[1][0]))]
    if name == "all_to_all_single":
        return [(args[0], (lambda value: value * 1, args[1]))]
    outputs = args[0].view(2, -1).unbind() if name == "all_gather_into_tensor" else args[0]
    return [(output.view(-1), (lambda value: value.view(-1) * 1, args[1])) for output in outputs]


@_disable_current_modes()
def carry_out(operation, args):
    results = [(output, function(value)) for output, (function, value) in written(ops.OPERATIONS[operation], args)]
    for output, result in results:
        output.copy_(result)


class OnDevice(Pending):
    stream_ordered = True

    def __init__(self, world, operation, args):
        self._world = world
        before = world.record()
        with world.on(world.side_stream()):
            world.wait(before)
            for output, (function, value) in written(operation, args):
                world.launch(function, output, value)
            self._event = world.record()

    def poll(self):
        return self._world.done(self._event)

    def order(self):
        self._world.wait(self._event)


class Part:
    """One of the two backends; the rest of it is in `Pair.fit`."""

    def __init__(self, name):
        self.name = name

    def join(self, group):
        pass


class Pair(Hierarchical):
    """A backend with streams within hosts and one for host memory between them, seen from the first of four ranks.

    Args:
        hosts: of the ranks.
        world: the device; None: all is done at once in host memory.
    """

    inner, outer = Part("device"), Part("host")

    def __init__(self, hosts, world=None, seed=0):
        self.world, self.random, self.turns = world, random.Random(seed), Turns()
        groups = Groups(HashStore(), 0, list(hosts))
        super().__init__({"device": self.inner, "host": self.outer}, Layouts(groups), self.fit)
        self.group = groups.make([0, 1, 2, 3], "four")
        self.join(self.group)

    def fit(self, backend, operation, group, args):
        def method(where, *args):
            if self.world is None:
                carry_out(operation.name, args)
                return DONE
            if backend.name == "device":
                return OnDevice(self.world, operation, args)
            return HostCall(self.world, operation.name, args, self.random.randrange(6), carry_out)

        if self.world is None or backend.name == "device":
            return method
        return through_host(operation, method, lambda tensor: self.world, self.turns)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape).add(1)


def some(count):
    return [numbers(BLOCK).add(number) for number in range(count)]


CALLS = {
    "all_reduce": lambda: (numbers(7), "sum"),
    "all_reduce of equal parts": lambda: (numbers(8).mul(1.0), "avg"),
    "broadcast": lambda: (numbers(7), 0),
    "broadcast of another": lambda: (numbers(7), 3),
    "all_gather_into_tensor": lambda: (torch.empty(4 * BLOCK), numbers(BLOCK).mul(1.0)),
    "all_gather": lambda: ([torch.empty(BLOCK) for _ in range(4)], numbers(BLOCK).mul(1.0)),
    "reduce_scatter_tensor": lambda: (torch.empty_like(numbers(BLOCK)), numbers(4 * BLOCK), "sum"),
    "reduce_scatter": lambda: (torch.empty_like(numbers(BLOCK)), some(4), "sum"),
    "all_to_all_single": lambda: (torch.empty(4 * BLOCK), numbers(4 * BLOCK).mul(1.0), None, None),
    "all_to_all_single of splits": lambda: (torch.empty(8), numbers(8).mul(1.0), [2, 2, 2, 2], [2, 2, 2, 2]),
    "all_to_all": lambda: ([torch.empty_like(part) for part in some(4)], some(4)),
}


def issue(pair, name):
    """Return the Pending of a call and the tensors with its results."""
    args = CALLS[name]()
    outputs = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
    return getattr(pair, name.split()[0])(pair.group, *args), outputs


def on(world, monkeypatch):
    monkeypatch.setattr(hierarchical, "device_of", lambda tensor: world)


@pytest.fixture(params=[0, 1 << 16], ids=["in place", "by a copy"])
def direct(request, monkeypatch):
    monkeypatch.setattr(hierarchical, "_DIRECT_BYTES", request.param)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_call_blocks_nobody_while_its_producers_run(monkeypatch, direct, hosts):
    for name in CALLS:
        world = Simulation(0)
        on(world, monkeypatch)
        with world.on(world.streams[0]), Kernels(world):
            pair = Pair(HOSTS[hosts], world)
            gate = world.hold()
            pending, _ = issue(pair, name)
            assert not any(pending.poll() for _ in range(50)), name
            world.release(gate)
            assert any(pending.poll() for _ in range(2000)), name


@pytest.mark.parametrize("hosts", HOSTS)
def test_calls_give_the_results_of_host_memory_and_nothing_races(monkeypatch, direct, hosts):
    for seed in range(5):
        world, choose, progress = Simulation(seed), random.Random(seed), Progress(timeout_s=20)
        on(None, monkeypatch)
        plain = Pair(HOSTS[hosts])
        expected = {name: issue(plain, name) for name in CALLS}
        for pending, _ in expected.values():
            assert pending.poll()
        on(world, monkeypatch)
        pair = Pair(HOSTS[hosts], world, seed)
        outstanding = []
        for name in CALLS:
            with world.on(choose.choice(world.streams)), Kernels(world):
                pending, outputs = issue(pair, name)
                outstanding.append((Work(pending, Call(ops.ALL_REDUCE, pair.group, name, 0), progress), outputs, name))
                del pending
        choose.shuffle(outstanding)
        for work, outputs, name in outstanding:
            with world.on(choose.choice(world.streams)), Kernels(world):
                work.wait()
                seen = [output.mul(1) for output in outputs]
                world.synchronize(world.record())
            for result, wanted in zip(seen, expected[name][1], strict=True):
                world.host_access([result])
                assert torch.equal(result, wanted), f"{name}: {result} is not {wanted}"


def test_numbers_copied_to_the_device_in_a_call_are_caught(monkeypatch):
    world = Simulation(0)
    with world.on(world.streams[0]), Kernels(world):
        world.hold()
        with pytest.raises(AssertionError, match="the host waits for ever"):
            torch.tensor([1, 2, 3])
