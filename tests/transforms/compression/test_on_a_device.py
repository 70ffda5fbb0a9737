"""Compressed calls on tensors of a simulated device, where every torch operation is a kernel."""

import random
import threading
from contextlib import nullcontext

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl import safety
from deepspeed_mcrdl.errors import CallFailedError
from deepspeed_mcrdl.groups import Groups
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.transforms.compression.compressed import Compressed, Halves
from deepspeed_mcrdl.transforms.staging import through_host
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import DONE, Pending, Work
from tests.transforms.compression.cases import codec
from tests.transforms.programs import HostCall
from tests.transforms.simulated import Kernels, Simulation

SIZES = (8, 1300)  # even, so that both ranks' payloads have one size
ROUNDS = 4


class Mirror:
    """A backend whose other rank does what this one does: what it sends is what it is sent.

    Args:
        kind: "host": takes host memory; "device": has a stream of its own; "at once": is done when it starts.
    """

    def __init__(self, kind):
        self.name = kind
        self.devices = {"cpu"}


@_disable_current_modes()
def mirrored(operation, args):
    """Do what the other rank would do, too."""
    if operation == "all_to_all_single":
        args[0].copy_(args[1])
    else:
        for output in _outputs(args):
            output.copy_(args[1])


class MirroredOnDevice(Pending):
    stream_ordered = True

    def __init__(self, world, operation, args):
        self._world, self._args = world, args
        before = world.record()
        with world.on(world.side_stream()):
            world.wait(before)
            for output in [args[0]] if operation == "all_to_all_single" else _outputs(args):
                world.launch(lambda value: value, output, args[1])
            self._event = world.record()

    def poll(self):
        return self._world.done(self._event)

    def order(self):
        self._world.wait(self._event)


def _outputs(args):
    return args[0].view(2, -1).unbind() if isinstance(args[0], torch.Tensor) else args[0]


class Calls:
    """Compressed calls of a group of two, of which this is the first rank."""

    def __init__(self, name, world=None, seed=0, kind=None):
        self.world, self.random, self.turns = world, random.Random(seed), Turns()
        groups = Groups(HashStore(), 0, ["here", "here"])
        self.group = groups.make([0, 1], "two")
        self.compressed = Compressed(
            codec(name), groups, lambda backend, part: None, self.fit, 2**30, lambda tensor: world
        )
        self.backend = Mirror(kind or ("at once" if world is None else self.random.choice(["host", "device"])))
        self.compressed.prepare(self.backend, self.group, torch.device("cpu"))

    def fit(self, backend, operation, group, args):
        def method(where, *args):
            if backend.name == "host":
                return HostCall(self.world, operation.name, args, self.random.randrange(6), mirrored)
            if backend.name == "device":
                return MirroredOnDevice(self.world, operation.name, args)
            mirrored(operation.name, args)
            return DONE

        if backend.name == "host":
            return through_host(operation, method, lambda tensor: self.world, self.turns)
        return method

    def all_reduce(self, tensor, partitions):
        return self.compressed.all_reduce(self.backend, partitions, self.group, tensor, "avg")

    def all_to_all(self, output, tensor):
        return self.compressed.all_to_all_single(self.backend, self.group, output, tensor)


class Drives(Progress):
    """Where what a thread that drives does is kernels of the device, too."""

    def __init__(self, world):
        super().__init__(timeout_s=20)
        self._kernels = Kernels(world)

    def drive(self):
        with nullcontext() if threading.current_thread() is threading.main_thread() else self._kernels:
            super().drive()


class Job:
    """A few training steps, on a simulated device and beside it at once in host memory.

    Args:
        name: of the codec.
        seed: of the order of things.
        driven: whether a thread drives.
    """

    def __init__(self, name, seed, driven=False):
        self.world, self.random = Simulation(seed), random.Random(f"job {seed}")
        self.kernels = Kernels(self.world)
        self.plain = Calls(name)
        with self.kernels:
            self.calls = Calls(name, self.world, seed)
        self.activations = not self.calls.compressed.codec.wants_feedback
        self.progress = Drives(self.world)
        if driven:
            self.progress.drive_in_background()

    def run(self):
        """Carry it out and compare all results.

        Raises:
            AssertionError: if one differs, or there is a race.
            CallFailedError: if there is one in a poll.
        """
        partitions = self.random.choice([1, 2])
        for number in range(ROUNDS):
            waits = []
            for size in SIZES:
                waits.append(self._reduce(size, number, partitions))
                if self.activations:
                    waits.append(self._exchange(size, number))
            self.random.shuffle(waits)
            for wait in waits:
                wait()
            for calls in (self.plain, self.calls):
                calls.compressed.identities.end_step()

    def _new(self, size, number):
        stream = self.random.choice(self.world.streams)
        expected = torch.arange(size).sub(size / 3).mul(number + 1).div(7)
        with self.world.on(stream), self.kernels:
            return stream, torch.arange(size).sub(size / 3).mul(number + 1).div(7), expected

    def _reduce(self, size, number, partitions):
        stream, tensor, expected = self._new(size, number)
        assert self.plain.all_reduce(expected, partitions).poll()
        with self.world.on(stream), self.kernels:
            return self._wait(self.calls.all_reduce(tensor, partitions), tensor, expected)

    def _exchange(self, size, number):
        stream, tensor, values = self._new(size, number)
        expected = torch.empty_like(values)
        assert self.plain.all_to_all(expected, values).poll()
        with self.world.on(stream), self.kernels:
            output = torch.empty_like(tensor)
            return self._wait(self.calls.all_to_all(output, tensor), output, expected)

    def _wait(self, pending, tensor, expected):
        work = Work(pending, Call(ops.ALL_REDUCE, self.calls.group, "mirror", 0), self.progress)
        seen = self.random.random() < 0.7

        def wait():
            with self.world.on(self.random.choice(self.world.streams)), self.kernels:
                work.wait()
                if seen:
                    result = tensor.mul(1)
                    self.world.synchronize(self.world.record())
            if seen:
                self.world.host_access([result])
                assert torch.equal(result, expected), f"{result} is not {expected}"

        return wait


def run_jobs(name, driven=False):
    for seed in range(8):
        job = Job(name, seed, driven)
        try:
            job.run()
        except (AssertionError, CallFailedError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            job.progress.close()


@pytest.mark.parametrize("name", ["bf16", "int8", "onebit", "graddrop"])
def test_calls_on_a_device_give_the_bits_of_host_memory_and_nothing_races(name):
    run_jobs(name)


@pytest.mark.parametrize("name", ["onebit", "graddrop"])
def test_nor_does_anything_where_a_thread_drives_too(name, monkeypatch):
    monkeypatch.setattr(safety, "_BACKGROUND_S", 1e-5)
    run_jobs(name, driven=True)


def test_what_the_host_reads_must_have_happened(monkeypatch):
    aside = Halves.aside
    monkeypatch.setattr(Halves, "aside", lambda self, number, reads: aside(self, number, False))
    with pytest.raises(AssertionError, match="seed"):
        run_jobs("graddrop")


def test_what_error_feedback_keeps_needs_one_stream(monkeypatch):
    aside = Halves.aside

    def of_the_calls_own(self, number, reads):
        self.streams.clear()
        return aside(self, number, reads)

    monkeypatch.setattr(Halves, "aside", of_the_calls_own)
    with pytest.raises(AssertionError, match="no order between them"):
        run_jobs("onebit")


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("name", ["bf16", "onebit", "graddrop"])
def test_a_call_waits_for_no_later_calls_producers(name, kind):
    world = Simulation(1)
    kernels, (first, second) = Kernels(world), world.streams[:2]
    with kernels:
        calls = Calls(name, world, kind=kind)
    with world.on(first), kernels:
        pending = calls.all_reduce(torch.arange(1300).mul(1.0), 1)
    with world.on(second), kernels:
        gate = world.hold()  # such as a receive from a rank that waits for the first call
        later = calls.all_reduce(torch.arange(1300).mul(2.0), 1)
    with world.on(first), kernels:
        assert any(pending.poll() for _ in range(2000))
    world.release(gate)
    with world.on(second), kernels:
        assert any(later.poll() for _ in range(2000))
