import gc
import random
import weakref
from contextlib import nullcontext

import pytest
import torch

from deepspeed_mcrdl import aside, safety
from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.errors import CallFailedError
from deepspeed_mcrdl.operations import OPERATIONS
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.streams import CudaDevice, Device, device_of
from deepspeed_mcrdl.transforms.staging import in_turn, through_host
from deepspeed_mcrdl.transforms.steps import Step, chain
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import Pending, Together, Work
from tests.transforms.programs import SIZE, DeviceCall, HostCall, Program, group
from tests.transforms.simulated import Event, Race, Simulation

ALL_REDUCE = OPERATIONS["all_reduce"]


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_values_are_right_and_nothing_races_in_random_programs(streams):
    for seed in range(50):
        try:
            Program(Simulation(seed, streams), seed).run(60)
        except Exception as error:
            raise AssertionError(f"seed {seed} on {streams} streams") from error


def test_nor_do_they_where_a_thread_drives_too(monkeypatch):
    monkeypatch.setattr(safety, "_BACKGROUND_S", 1e-5)
    for seed in range(50):
        program = Program(Simulation(seed), seed)
        program.progress.drive_in_background()
        try:
            program.run(60)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            program.progress.close()


# --- each part of the order is needed ---


class Through(Device):
    """A simulated device as it is; a mutant leaves one thing out."""

    def __init__(self, simulation):
        self.simulation = simulation

    @property
    def on_side_stream(self):
        return self.simulation.current not in self.simulation.streams

    def record(self):
        return self.simulation.record()

    def wait(self, event):
        self.simulation.wait(event)

    def done(self, event):
        return self.simulation.done(event)

    def synchronize(self, event):
        self.simulation.synchronize(event)

    def side_stream(self):
        return self.simulation.side_stream()

    def on(self, stream):
        return self.simulation.on(stream)

    def copy(self, destination, source):
        self.simulation.copy(destination, source)

    def host_buffer(self, like):
        return self.simulation.host_buffer(like)


class NothingBeforeTheCopyOut(Through):
    def wait(self, event):
        if not self.on_side_stream:
            super().wait(event)


class NoWaitAfterTheCopyBack(Through):
    def wait(self, event):
        if self.on_side_stream:
            super().wait(event)


class EventsTakenForDone(Through):
    def done(self, event):
        return True


def happened():
    event = Event({})
    event.happened = True
    return event


class NoEventOfTheProducers(Through):
    def record(self):
        return super().record() if self.on_side_stream else happened()


class NoEventAfterTheCopies(Through):
    def record(self):
        return happened() if self.on_side_stream else super().record()


class CopiesOnWhateverStreamIsCurrent(Through):
    def on(self, stream):
        return nullcontext()


def caught(device=Through):
    """Return whether some program goes wrong."""
    for seed in range(40):
        simulation = Simulation(seed)
        try:
            Program(simulation, seed, device(simulation)).run(60)
        except AssertionError:
            return True
        except CallFailedError as error:
            if not isinstance(error.__cause__, Race):  # one that is found in a poll is an error of the call
                raise
            return True
    return False


@pytest.mark.parametrize(
    "mutant",
    [
        NothingBeforeTheCopyOut,
        NoWaitAfterTheCopyBack,
        EventsTakenForDone,
        NoEventOfTheProducers,
        NoEventAfterTheCopies,
        CopiesOnWhateverStreamIsCurrent,
    ],
)
def test_leaving_out_a_part_of_the_order_is_caught(mutant):
    assert caught(mutant)


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Progress, "watch", lambda self, work: None),  # buffers are used again before they have been copied back
        (Turns, "free", lambda self, lane: True),  # a call on host memory overtakes a staged one
    ],
)
def test_letting_go_of_buffers_or_turns_is_caught(monkeypatch, owner, name, replacement):
    monkeypatch.setattr(owner, name, replacement)
    assert caught()


def run_without_order(self, function, after):
    with self.on():
        return function()


READY = aside.Aside.ready


def ready_as_if_nothing_was_read(self, after):
    self._reads = False
    return READY(self, after)


@pytest.mark.parametrize(("name", "replacement"), [("run", run_without_order), ("ready", ready_as_if_nothing_was_read)])
def test_steps_that_dont_wait_for_each_other_are_caught(monkeypatch, name, replacement):
    monkeypatch.setattr(aside.Aside, name, replacement)
    assert caught()


def test_starting_whatever_is_ready_is_caught(monkeypatch):
    def advance(self):
        if self._lock.acquire(blocking=False):
            for turn in [turn for turn in self._waiting if turn.ready()]:
                turn.start()
                self._waiting.remove(turn)
            self._lock.release()

    monkeypatch.setattr(Turns, "advance", advance)
    assert caught()


def test_a_race_is_caught_even_if_the_values_come_out_right():
    simulation = Simulation(0)
    first, second = simulation.streams[:2]
    with simulation.on(first):
        tensor = simulation.empty(SIZE)
        simulation.launch(lambda: torch.ones(SIZE, dtype=torch.int64), tensor)
        simulation.synchronize(simulation.record())
    with simulation.on(second):
        simulation.launch(lambda value: value, tensor, tensor)  # after the host, which has waited
    with simulation.on(first), pytest.raises(Race, match="stream 1 reads memory that was written by stream 2"):
        simulation.launch(lambda value: value, simulation.empty(SIZE), tensor)


# --- nobody is held up ---


class Host:
    """A backend on host memory that notes what it has started."""

    def __init__(self, simulation):
        self.simulation = simulation
        self.turns = Turns()
        self.group = group()
        self.started = []

    def method(self, name, error=None):
        def start(where, *args):
            self.started.append(name)
            if error is not None:
                raise error
            return HostCall(self.simulation, "all_reduce", args, 2)

        return start

    def staged(self, name, where, tensor, error=None):
        method = through_host(ALL_REDUCE, self.method(name, error), lambda tensor: self.simulation, self.turns)
        return method(where, tensor, "sum")

    def send(self, name, tensor, dst, tag):
        def start(where, *args):
            self.started.append(name)
            return HostCall(self.simulation, "send", args, 2)

        method = through_host(OPERATIONS["send"], start, lambda tensor: self.simulation, self.turns)
        return method(self.group, tensor, dst, tag)

    def on_host(self, name, where):
        return in_turn(ALL_REDUCE, self.method(name), self.turns)(where, torch.zeros(SIZE, dtype=torch.int64), "sum")


@pytest.fixture
def simulation():
    return Simulation(0)


@pytest.fixture
def host(simulation):
    return Host(simulation)


def ones(simulation, stream):
    with simulation.on(stream):
        tensor = simulation.empty(SIZE)
        simulation.launch(lambda: torch.ones(SIZE, dtype=torch.int64), tensor)
    return tensor


def ends(pending, polls=200):
    return any(pending.poll() for _ in range(polls))


def test_a_call_whose_data_has_not_come_holds_up_its_group_but_nothing_else(simulation, host):
    held, free = simulation.streams[:2]
    tensor, other = ones(simulation, held), ones(simulation, free)
    ours, theirs = group(0), group(1)
    with simulation.on(held):
        gate = simulation.hold()  # such as another backend's collective, which waits for other ranks
        first = host.staged("first", ours, tensor)
    with simulation.on(free):
        second = host.staged("second", theirs, other)
        third = host.staged("third", ours, ones(simulation, free))
    fourth = host.on_host("fourth", ours)
    fifth = host.on_host("fifth", theirs)
    assert ends(second)
    assert ends(fifth)
    assert not any(ends(pending) for pending in (first, third, fourth))
    assert host.started == ["second", "fifth"]
    simulation.release(gate)
    assert ends(fourth), "whoever waits starts the earlier ones too"
    assert host.started == ["second", "fifth", "first", "third", "fourth"]
    assert ends(third)
    assert ends(first)


def test_a_message_whose_data_has_not_come_holds_up_those_with_its_tag_to_the_same_rank(simulation, host):
    held, free = simulation.streams[:2]
    first, *others = [ones(simulation, stream) for stream in (held, free, free, free)]
    with simulation.on(held):
        gate = simulation.hold()
        host.send("first", first, 1, 0)
    with simulation.on(free):
        host.send("same tag", others[0], 1, 0)
        assert ends(host.send("other tag", others[1], 1, 1))
        last = host.send("other rank", others[2], 0, 0)
    assert ends(last)
    assert host.started == ["other tag", "other rank"]
    simulation.release(gate)
    simulation.synchronize(simulation.record())
    for _ in range(200):
        host.turns.advance()
    assert host.started == ["other tag", "other rank", "first", "same tag"]


def test_outputs_that_nobody_holds_any_more_live_until_they_are_written_and_no_longer(simulation, host):
    progress, seen = Progress(timeout_s=20), []
    for number in range(20):
        tensor = ones(simulation, simulation.streams[0])
        seen.append(weakref.ref(tensor))
        work = Work(host.staged("dropped", group(), tensor), Call(ALL_REDUCE, group(), "host", number), progress)
        with simulation.on(simulation.streams[1]):
            work.wait()
        del work, tensor
        ones(simulation, simulation.streams[0])  # which waits for nothing
    while progress:
        progress.drive()
    assert not any(tensor() is not None for tensor in seen)


def test_an_error_at_the_start_is_that_of_its_own_call_and_leaves_the_outputs_alone(simulation, host):
    stream = simulation.streams[0]
    wrong, right = ones(simulation, stream), ones(simulation, stream)
    first = host.staged("first", group(), wrong, RuntimeError("lost"))
    second = host.staged("second", group(), right)
    assert ends(second)
    with pytest.raises(RuntimeError, match="lost"):
        ends(first)
    simulation.host_access([right, wrong])
    assert right.tolist() == [2] * SIZE
    assert wrong.tolist() == [1] * SIZE


def test_steps_of_a_backend_with_streams_are_all_issued_in_the_call(simulation):
    def fit(backend, operation, where, args):
        return lambda where, *args: DeviceCall(simulation, operation.name, args)

    issued = []
    with simulation.on(simulation.streams[0]):
        tensor = ones(simulation, simulation.streams[0])
        simulation.hold()
        steps = [Step(name, group(), ALL_REDUCE, lambda: (tensor, "sum")) for name in ("one", "two")]
        pending = chain(Turns(), fit, steps, lambda: issued.append("finish"), Aside(simulation))
    assert issued == ["finish"]
    assert pending.orderable()
    assert not ends(pending)


@pytest.mark.parametrize("failing", ["a step", "a part"])
def test_what_a_failed_call_has_under_way_keeps_its_memory(simulation, failing):
    def fit(backend, operation, where, args):
        return lambda where, *args: DeviceCall(simulation, operation.name, args)

    def fail():
        raise RuntimeError("lost")

    def call(number, finish, *after):
        tensor = ones(simulation, simulation.streams[0])
        steps = [Step(number, group(number), ALL_REDUCE, lambda: (tensor, "sum"))]
        steps += [Step(number, group(number + 2), ALL_REDUCE, each) for each in after]
        return chain(Turns(), fit, steps, finish, Aside(simulation))

    progress = Progress(timeout_s=20)
    with simulation.on(simulation.streams[0]):
        simulation.hold()
        pending = call(0, fail, fail) if failing == "a step" else Together([call(0, fail), call(1, list)])
        work = Work(pending, Call(ALL_REDUCE, group(), "device", 0), progress)
        del pending
        with pytest.raises(CallFailedError, match="lost"):
            work.wait()
        del work
        gc.collect()  # the error knows the frames that it came through
        for _ in range(4):
            ones(simulation, simulation.streams[0])  # which waits for nothing


def test_a_receive_tells_its_source():
    class Received(Pending):
        def poll(self):
            return True

        def source_rank(self):
            return 7

    simulation = Simulation(0)
    turns = Turns()
    recv = through_host(OPERATIONS["recv"], lambda *args: Received(), lambda tensor: simulation, turns)
    pending = recv(group(), simulation.empty(SIZE), None, 0)
    assert ends(pending)
    assert pending.source_rank() == 7


def test_host_memory_is_on_no_device():
    assert device_of(torch.zeros(1)) is None


# --- the same on a GPU ---


class GPU(CudaDevice):
    """What simulated.Simulation is to a program, on a GPU."""

    def __init__(self, seed, streams):
        super().__init__(0)
        self._random = random.Random(seed)
        self.streams = [torch.cuda.Stream(0) for _ in range(streams)]

    def empty(self, *shape):
        return torch.empty(shape, dtype=torch.int64, device="cuda:0")

    def launch(self, function, output, *inputs):
        torch.cuda._sleep(self._random.choice([0, 1_000, 100_000, 1_000_000]))
        output.copy_(function(*inputs))

    def host_access(self, reads=(), writes=()):
        pass

    def tick(self):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", range(20))
def test_values_are_right_on_a_gpu(seed):
    Program(GPU(seed, 3), seed).run(60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_call_returns_while_its_producer_runs_on_a_gpu():
    gpu = GPU(0, 1)
    with gpu.on(gpu.streams[0]):
        tensor = torch.ones(SIZE, dtype=torch.int64, device="cuda:0")
        gpu.host_buffer(tensor)  # the first of its size is allocated, which may wait for kernels; later ones are not
        torch.cuda._sleep(500_000_000)
        produced = gpu.record()
        method = through_host(ALL_REDUCE, lambda _, *args: HostCall(gpu, "all_reduce", args, 2), device_of, Turns())
        pending = method(group(), tensor, "sum")
        assert not gpu.done(produced)
        assert not pending.poll()
        gpu.synchronize(produced)
        while not pending.poll():
            pass
    assert tensor.tolist() == [2] * SIZE
