"""Strided tensors of a device: what is copied back is in order with whoever waits. On real ranks: tests/backends."""

import random

import pytest
import torch

from deepspeed_mcrdl import aside
from deepspeed_mcrdl.operations import ALL_REDUCE
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.work import Then, Work
from tests.transforms.programs import DeviceCall, group
from tests.transforms.simulated import Kernels, Race, Simulation


def strided_calls(world, seed):
    """Make strided calls on one stream, wait for each on another one or ask whether it is done, and compare."""
    choose, kernels, progress = random.Random(seed), Kernels(world), Progress(timeout_s=20)
    method = through_contiguous(ALL_REDUCE, lambda where, *args: DeviceCall(world, "all_reduce", args))
    for number in range(10):
        first, second, third = (choose.choice(world.streams) for _ in range(3))
        with world.on(first), kernels:
            tensor = torch.arange(12).add(number).view(3, 4)
            pending = method(group(), tensor.t(), "sum")
        work = Work(pending, Call(ALL_REDUCE, group(), "device", number), progress)
        with world.on(second), kernels:
            while choose.random() < 0.5 and not work.is_completed():
                pass
            work.wait()
        with world.on(third), kernels:
            work.wait()
            result = tensor.mul(1)
            world.synchronize(world.record())
        world.host_access([result])
        assert torch.equal(result, torch.arange(12).add(number).mul(2).view(3, 4))


def test_whoever_waits_comes_after_the_copy_back(monkeypatch):
    for seed in range(20):
        world = Simulation(seed)
        monkeypatch.setattr(aside, "device_of", lambda tensor, world=world: world)
        strided_calls(world, seed)


def test_copying_on_whatever_stream_is_current_is_caught(monkeypatch):
    monkeypatch.setattr("deepspeed_mcrdl.transforms.contiguous.then", lambda first, step, tensor: Then(first, step))
    with pytest.raises(Race):
        strided_calls(Simulation(0), 0)
