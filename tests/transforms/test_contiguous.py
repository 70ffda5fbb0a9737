"""Strided tensors of a device: what is copied back is in order with whoever waits. On real ranks: tests/backends."""

import random

import pytest
import torch

from deepspeed_mcrdl import aside
from deepspeed_mcrdl.errors import CallFailedError
from deepspeed_mcrdl.operations import ALL_REDUCE
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.work import Pending, Then, Work
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


class Aborted(Pending):
    """A call of a backend with streams that has been put in order, and fails later."""

    stream_ordered = True

    def poll(self):
        raise RuntimeError("aborted")

    def order(self):
        pass


def test_what_fails_after_it_has_been_put_in_order_fails_the_call(monkeypatch):
    world = Simulation(0)
    monkeypatch.setattr(aside, "device_of", lambda tensor: world)
    method = through_contiguous(ALL_REDUCE, lambda where, *args: Aborted())
    with world.on(world.streams[0]), Kernels(world):
        pending = method(group(), torch.arange(12).view(3, 4).t(), "sum")
        work = Work(pending, Call(ALL_REDUCE, group(), "device", 0), Progress(timeout_s=20))
        assert work.wait()
        with pytest.raises(CallFailedError, match="aborted"):
            work.finish()
        assert not work.is_success()


class Later(Pending):
    def __init__(self):
        self.done = False

    def poll(self):
        return self.done


def test_a_call_made_in_inference_mode_may_be_waited_for_outside_it():
    first = Later()
    with torch.inference_mode():
        tensor = torch.zeros(3, 4)
        pending = through_contiguous(ALL_REDUCE, lambda where, *args: first)(group(), tensor.t(), "sum")
        work = Work(pending, Call(ALL_REDUCE, group(), "host", 0), Progress(timeout_s=20))
    first.done = True
    assert work.wait()


def test_copying_on_whatever_stream_is_current_is_caught(monkeypatch):
    monkeypatch.setattr("deepspeed_mcrdl.transforms.contiguous.then", lambda first, step, tensor: Then(first, step))
    with pytest.raises(Race):
        strided_calls(Simulation(0), 0)
