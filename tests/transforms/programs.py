"""Random programs of kernels on streams and calls of a backend that takes host memory.

Each step is also done at once on plain tensors, which gives the values that must be there at the end. A program uses a
tensor on one stream at a time, and on another one only after a wait, so that any race is one of what it tests.
"""

from __future__ import annotations

import random
from collections import defaultdict

import torch

from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.groups import Group, Mesh
from deepspeed_mcrdl.operations import OPERATIONS
from deepspeed_mcrdl.safety import Call, Progress
from deepspeed_mcrdl.transforms.staging import in_turn, through_host
from deepspeed_mcrdl.transforms.steps import Step, chain
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import Pending, Work

PRIME = 10007
SIZE = 6
KERNELS = [
    (1, lambda a: (a + 5) % PRIME),
    (1, lambda a: (a * 3 + 1) % PRIME),
    (2, lambda a, b: (a + 7 * b) % PRIME),
]
KINDS = (
    *("all_reduce", "broadcast", "all_to_all", "all_gather", "reduce_scatter"),
    *("strided", "gather", "recv", "send", "barrier"),
)
WAITS = ("wait", "wait", "wait twice", "poll")


def group(number=0):
    return Group([0, 1], 0, f"group {number}", number, Mesh(1, 2, 1), None)


def carry_out(operation, args):
    """Do what the backend of these tests does for a call: some function of the inputs, written to all outputs."""
    if operation == "all_reduce":
        args[0].mul_(2).remainder_(PRIME)
    elif operation == "broadcast":
        tensor, src = args
        if src != 0:
            tensor.copy_((torch.arange(tensor.numel()) * 11 + src).view_as(tensor))
    elif operation == "all_to_all":
        outputs, inputs = args
        for number, (output, value) in enumerate(zip(outputs, [t.clone() for t in reversed(inputs)], strict=True)):
            output.copy_((value * 5 + number) % PRIME)
    elif operation == "all_gather_into_tensor":
        output, value = args[0], args[1].clone()
        for number, row in enumerate(output.view(2, -1)):
            row.copy_((value.view(-1) * (number + 1)) % PRIME)
    elif operation == "reduce_scatter_tensor":
        output, rows = args[0], args[1].clone().view(2, -1)
        output.copy_(((rows[0] + rows[1]) % PRIME).view_as(output))
    elif operation == "gather":
        outputs, value, dst = args
        if dst == 0:
            for number, output in enumerate(outputs):
                output.copy_((value + number) % PRIME)
    elif operation == "recv":
        args[0].copy_((torch.arange(args[0].numel()) + args[2]).view_as(args[0]))
    else:
        assert operation in ("send", "barrier"), operation


class HostCall(Pending):
    """A call that reads its inputs when it starts and when it ends, and writes its outputs after some polls."""

    host_driven = True

    def __init__(self, world, operation, args, polls, carry_out=carry_out):
        self._world, self._operation, self._args, self._polls = world, operation, args, polls
        self._carry_out = carry_out
        self._inputs, self._outputs = OPERATIONS[operation].tensors(*args)
        world.host_access(self._inputs)

    def poll(self):
        assert self._polls > 0 or self._args is not None, "it is polled no more when it is done"
        self._world.tick()
        self._polls -= 1
        if self._polls > 0:
            return False
        self._world.host_access(self._inputs, self._outputs)
        self._carry_out(self._operation, self._args)
        self._args = None
        return True


class DeviceCall(Pending):
    """A call of a backend that has a stream of its own, as NCCL has: it waits for the stream that is current."""

    stream_ordered = True

    def __init__(self, world, operation, args):
        self._world = world
        before = world.record()
        with world.on(world.side_stream()):
            world.wait(before)
            output, value = args[0], args[0 if operation == "all_reduce" else 1]
            world.launch(lambda value: _result(operation, value), output, value)
            self._event = world.record()
        self._ended = False

    def poll(self):
        assert not self._ended, "it is polled no more when it is done"
        self._ended = self._world.done(self._event)
        return self._ended

    def order(self):
        self._world.wait(self._event)


def _result(operation, value):
    output = value.clone() if operation == "all_reduce" else value.new_empty(2, value.numel())
    carry_out(operation, (output, value) if operation != "all_reduce" else (output, "sum"))
    return output


class Value:
    """A tensor, what it must hold, and the stream that may use it now; None while a call has it."""

    def __init__(self, tensor, expected, stream):
        self.tensor, self.expected, self.stream = tensor, expected, stream


class Program:
    """One random program.

    Args:
        world: what it runs on: simulated.Simulation, or the like with a GPU.
        seed: which program.
        device: what staging takes for the device, if that is not `world`.
    """

    def __init__(self, world, seed, device=None):
        self.world = world
        self.device = device or world
        self.random = random.Random(f"program {seed}")
        self.progress = Progress(timeout_s=20)
        self.turns = Turns()
        self.groups = [group(0), group(1)]
        self.parts = [(group(2), group(3)), (group(4), group(5))]  # of calls in steps
        self.shared = [world.side_stream() for _ in self.parts]
        self.chains = Turns()
        self.values = []
        self.outstanding = []
        self.started, self.issued = defaultdict(list), defaultdict(list)

    def run(self, steps):
        """Carry out `steps` steps, then wait for all calls and compare all values.

        Raises:
            AssertionError: if a value is wrong, a call starts out of turn, or there is a race.
        """
        for _ in range(3):
            self._new_value()
        actions = [
            *(self._kernel, self._call, self._call, self._host_call, self._call_in_steps),
            *(self._finish, self._synchronize_streams),
        ]
        for _ in range(steps):
            self.random.choice(actions)()
        while self.outstanding:
            self._finish(last=self.random.random() < 0.5)
        assert self.started == self.issued, "calls must start in the order of the program"
        for value in self.values:
            self._compare(value)

    def _compare(self, value):
        if value.stream is not None:
            with self.world.on(value.stream):
                self.world.synchronize(self.world.record())
        self.world.host_access([value.tensor])
        assert torch.equal(value.tensor.cpu(), value.expected), f"{value.tensor} is not {value.expected}"

    def _new_value(self, stream=None, shape=(SIZE,)):
        stream = self.random.choice(self.world.streams) if stream is None else stream
        start = self.random.randrange(1000)
        size = torch.Size(shape).numel()
        expected = (torch.arange(size) + start).view(shape)
        with self.world.on(stream):
            value = Value(self.world.empty(*shape), expected.clone(), stream)
            self.world.launch(lambda: expected, value.tensor)
        self.values.append(value)
        return value

    def _usable(self, count, stream=None):
        """Return a stream and some values that it may use now."""
        stream = self.random.choice(self.world.streams) if stream is None else stream
        usable = [value for value in self.values if value.stream is stream and value.tensor.shape == (SIZE,)]
        self.random.shuffle(usable)
        while len(usable) < count:
            usable.append(self._new_value(stream))
        return stream, usable[:count]

    def _kernel(self):
        count, function = self.random.choice(KERNELS)
        stream, values = self._usable(count)
        target = values[0] if self.random.random() < 0.5 else self._new_value(stream)
        target.expected.copy_(function(*[value.expected for value in values]))
        with self.world.on(stream):
            self.world.launch(function, target.tensor, *[value.tensor for value in values])

    def _synchronize_streams(self):
        first, second = self.random.choice(self.world.streams), self.random.choice(self.world.streams)
        with self.world.on(first):
            event = self.world.record()
        with self.world.on(second):
            self.world.wait(event)
        for value in self.values:
            if value.stream is first:
                value.stream = second

    def _arguments(self):
        """Return an operation, the stream of its call, its values, and from tensors the arguments."""
        kind = self.random.choice(KINDS)
        if kind == "all_reduce":
            return "all_reduce", *self._usable(1), lambda a: (a, "sum")
        if kind == "broadcast":
            src = self.random.randrange(2)
            return "broadcast", *self._usable(1), lambda a: (a, src)
        if kind == "all_to_all":
            inputs = [2, 3] if self.random.random() < 0.7 else [0, 1]  # in place
            return "all_to_all", *self._usable(4), lambda *t: ([t[0], t[1]], [t[i] for i in inputs])
        if kind == "all_gather":  # of a part of the output, as ZeRO does
            stream, _ = self._usable(0)
            half = self.random.randrange(2)
            value = self._new_value(stream, (2, SIZE))
            return "all_gather_into_tensor", stream, [value], lambda a: (a, a[half])
        if kind == "reduce_scatter":
            stream, _ = self._usable(0)
            value = self._new_value(stream, (2, SIZE))
            return "reduce_scatter_tensor", stream, [value], lambda a: (a[1], a, "sum")
        if kind == "strided":
            stream, _ = self._usable(0)
            value = self._new_value(stream, (SIZE, 2))
            return "all_to_all", stream, [value], lambda a: ([a[:, 0], a[:, 1]], [a[:, 1], a[:, 0]])
        if kind == "gather":  # this rank, which is 0, may leave the outputs alone
            dst = self.random.randrange(2)
            return "gather", *self._usable(3), lambda a, b, c: ([a, b], c, dst)
        if kind == "recv":
            tag = self.random.randrange(3)
            return "recv", *self._usable(1), lambda a: (a, 1, tag)
        if kind == "send":
            tag = self.random.randrange(3)
            return "send", *self._usable(1), lambda a: (a, 1, tag)
        return "barrier", self.world.streams[0], [], lambda: ()

    def _call(self):
        operation, stream, values, arguments = self._arguments()
        carry_out(operation, arguments(*[value.expected for value in values]))
        args = arguments(*[value.tensor for value in values])
        with self.world.on(stream):
            self._issue(operation, args, values, staged=operation != "barrier")
            del args
            if operation == "send" and values[0].stream is None:  # not waited for: only the call holds its tensor now
                self.values.remove(values[0])
                values[0].tensor = None

    def _host_call(self):
        """Make a call on host memory, which must not overtake the staged ones of its group."""
        value = Value(torch.arange(SIZE), torch.arange(SIZE), None)
        carry_out("all_reduce", (value.expected, "sum"))
        self._issue("all_reduce", (value.tensor, "sum"), [value], staged=False)
        self.values.append(value)

    def _issue(self, name, args, values, staged):
        operation, where = OPERATIONS[name], self.random.choice(self.groups)
        lane = (where, name, *args[1:]) if name in ("send", "recv") else where
        number = len(self.issued[lane])
        self.issued[lane].append(number)
        polls = self.random.randrange(6)

        def method(where, *args):
            self.started[lane].append(number)
            return HostCall(self.world, name, args, polls)

        method = self._staged(operation, method) if staged else in_turn(operation, method, self.turns)
        self._wait_for(method(where, *args), Call(operation, where, "host", number), values, staged)

    def _call_in_steps(self):
        """Make a call of two steps with kernels before, between and after them, each step by a backend of either kind;
        the host may have to read what the device has computed."""
        stream, (value,) = self._usable(1)
        number = self.random.randrange(2)
        first, second = self.parts[number]
        reads = self.random.random() < 0.5
        backends = [self.random.choice(["host", "device"]) for _ in range(2)]
        lanes = [(backends[0], first), (backends[1], second)]
        places = {lane: len(self.issued[lane]) for lane in lanes}
        for lane, place in places.items():
            self.issued[lane].append(place)
        polls, tensor, made = self.random.randrange(6), value.tensor, []

        def summed():
            made.append(self.world.empty(SIZE))
            self.world.launch(lambda a: (a + 3) % PRIME, made[0], tensor)
            return made[0], "sum"

        def gathered():
            known = 1
            if reads:
                self.world.host_access([made[0]])
                known = int(made[0][0])
            made.extend((self.world.empty(SIZE), self.world.empty(2, SIZE)))
            self.world.launch(lambda a: (a * known) % PRIME, made[1], made[0])
            return made[2], made[1]

        def finish():
            self.world.launch(lambda rows: (rows[0] + 2 * rows[1]) % PRIME, tensor, made[2])
            made.clear()

        def fit(backend, operation, where, args):
            def method(where, *args):
                self.started[backend, where].append(places[backend, where])
                if backend == "device":
                    return DeviceCall(self.world, operation.name, args)
                return HostCall(self.world, operation.name, args, polls)

            return method if backend == "device" else self._staged(operation, method)

        expected = _result("all_reduce", (value.expected + 3) % PRIME)
        expected = _result("all_gather_into_tensor", (expected * (expected[0] if reads else 1)) % PRIME)
        value.expected.copy_((expected[0] + 2 * expected[1]) % PRIME)
        steps = [
            Step(backends[0], first, OPERATIONS["all_reduce"], summed),
            Step(backends[1], second, OPERATIONS["all_gather_into_tensor"], gathered),
        ]
        with self.world.on(stream):
            aside = Aside(self.device, self.random.choice([None, self.shared[number]]), reads)
            pending = chain(self.chains, fit, steps, finish, aside)
            self._wait_for(pending, Call(OPERATIONS["all_reduce"], first, "steps", 0), [value], True)

    def _staged(self, operation, method):
        return through_host(operation, method, lambda tensor: self.device, self.turns)

    def _wait_for(self, pending, call, values, on_device):
        """Wait for a call now, or later."""
        blocking = self.random.random()
        if blocking < 0.3:
            if blocking < 0.15 or not pending.stream_ordered:
                self.progress.finish(pending.poll, pending, call)
            else:  # the host goes on before the results have been copied
                Work(pending, call, self.progress).wait()
            return
        for value in values:
            value.stream = None
        self.outstanding.append((Work(pending, call, self.progress), values if on_device else []))

    def _finish(self, last=True):
        """Wait for a call, on any stream, which may use its tensors from then on."""
        if not self.outstanding:
            return
        work, values = self.outstanding.pop(-1 if last else self.random.randrange(len(self.outstanding)))
        stream, how = self.random.choice(self.world.streams), self.random.choice(WAITS)
        if how == "wait twice":
            with self.world.on(self.random.choice(self.world.streams)):
                work.wait()
        with self.world.on(stream):
            if how == "poll":
                while not work.is_completed():
                    self.progress.drive()
            else:
                assert work.wait()
        for value in values:
            value.stream = stream
