"""A simulated device, exact and without threads of its own: streams of kernels of random length in virtual time.

Memory is real, read when a kernel begins and written when it ends. Every access is also held against the order that the
program has made (vector clocks), so that a race is raised wherever it is possible, whether or not this run shows it.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial, wraps

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed_mcrdl.streams import Device

HOST = "host"


class Race(AssertionError):
    """Two accesses to the same memory, one of them a write, that nothing puts in order."""


class Actor:
    """Whatever does one thing after the other: the host, or a stream. `clock` says what comes before its next act."""

    def __init__(self, name):
        self.name = name
        self.clock = {}

    def act(self):
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def after(self, clock):
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))


class Stream(Actor):
    def __init__(self, name):
        super().__init__(name)
        self.queue = deque()
        self.busy_until = None


class Event:
    def __init__(self, clock):
        self.clock = dict(clock)
        self.happened = False


class Accesses:
    """The last accesses to each piece of memory."""

    def __init__(self):
        self._last = {}  # address -> (last write, reads since), each as {actor: tick}

    def check(self, actor, reads=(), writes=()):
        """Note what `actor` does now, or raise Race."""
        actor.act()
        for address in {address for tensor in reads for address in _addresses(tensor)}:
            written, read = self._last.setdefault(address, ({}, {}))
            self._ordered(actor, "reads", written, "written")
            read[actor.name] = actor.clock[actor.name]
        for address in {address for tensor in writes for address in _addresses(tensor)}:
            written, read = self._last.setdefault(address, ({}, {}))
            self._ordered(actor, "writes", written, "written")
            self._ordered(actor, "writes", read, "read")
            self._last[address] = ({actor.name: actor.clock[actor.name]}, {})

    @staticmethod
    def _ordered(actor, does, earlier, done):
        for name, tick in earlier.items():
            if actor.clock.get(name, 0) < tick:
                raise Race(f"{actor.name} {does} memory that was {done} by {name} with no order between them")


class Memory:
    """Memory that is used again as soon as nobody holds a tensor of it, as by a caching allocator."""

    def __init__(self):
        self._free = {}
        self._slots = {}

    @_disable_current_modes()
    def take(self, owner, shape, dtype):
        nbytes = shape.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        free = self._free.setdefault((owner, nbytes), [])
        if not free:
            free.append(numpy.full(nbytes, 0xFF, dtype=numpy.uint8))
            self._slots[free[-1].ctypes.data] = free[-1]
        slot = free.pop()
        handed_out = slot.view()  # which the tensor's storage holds
        weakref.finalize(handed_out, free.append, slot).atexit = False
        return torch.frombuffer(handed_out, dtype=dtype).view(shape)

    def address(self, tensor):
        """Return a tensor at the same address, which holds nothing; the tensor itself if it isn't in this memory."""
        slot = self._slots.get(tensor.untyped_storage().data_ptr())
        if slot is None or not tensor.numel():
            return tensor
        whole = torch.frombuffer(slot, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def locked(method):
    """Return a method of a Simulation that one thread at a time is in."""

    @wraps(method)
    def call(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Simulation(Device):
    """A device, and the host that uses it: all its threads as one, but for the stream that is current in each.

    Args:
        seed: of the lengths of kernels and of the host's own work.
        streams: how many streams the program has.
    """

    def __init__(self, seed, streams=3):
        self._random = random.Random(seed)
        self._now = 0.0
        self._accesses = Accesses()
        self._memory = Memory()
        self._host = Actor(HOST)
        self._made = 0
        self._at_work = {}
        self._lock = threading.RLock()
        self.streams = [self._stream("stream") for _ in range(streams)]
        self._thread = threading.local()
        self._thread.current = [self.streams[0]]

    @locked
    def _stream(self, kind):
        self._made += 1
        return Stream(f"{kind} {self._made}")

    # --- the verbs ---

    @locked
    def record(self):
        event = Event(self._issue().clock)
        self._put(("record", event))
        return event

    @locked
    def wait(self, event):
        self._issue().after(event.clock)
        self._put(("wait", event))

    @locked
    def done(self, event):
        self.tick()
        if event.happened:
            self._host.after(event.clock)
        return event.happened

    def synchronize(self, event):
        while not self.done(event):
            assert any(stream.busy_until is not None for stream in self._at_work), "the host waits for ever"

    def side_stream(self):
        return self._stream("side stream")

    @contextmanager
    def on(self, stream):
        self._streams_of_thread.append(stream)
        try:
            yield
        finally:
            self._streams_of_thread.pop()

    def copy(self, destination, source):
        self.launch(lambda value: value, destination, source)

    def host_buffer(self, like):
        return self._memory.take(HOST, like.shape, like.dtype)

    # --- what a program does ---

    @property
    def current(self):
        return self._streams_of_thread[-1]

    @property
    def _streams_of_thread(self):
        if not hasattr(self._thread, "current"):
            self._thread.current = [self._stream("default stream")]
        return self._thread.current

    def empty(self, *shape):
        """Return memory of the current stream, which its own kernels may use at once."""
        return self.allocate(torch.Size(shape), torch.int64)

    def allocate(self, shape, dtype):
        """Return memory of the current stream, as `empty` does."""
        return self._memory.take(self.current.name, shape, dtype)

    @locked
    @_disable_current_modes()
    def launch(self, function, output, *inputs):
        """Issue the kernel output = function(*inputs) on the current stream."""
        stream = self._issue()
        self._accesses.check(stream, inputs, [output])
        # A queue on a device holds addresses; it keeps nothing alive.
        addresses = [self._memory.address(tensor) for tensor in inputs]
        self._put(("kernel", function, self._memory.address(output), addresses))

    def hold(self):
        """Make the current stream stand still until `release` is given the event that is returned."""
        event = Event({})
        self.wait(event)
        return event

    def release(self, event):
        event.happened = True

    @locked
    @_disable_current_modes()
    def host_access(self, reads=(), writes=()):
        """The host reads and writes memory now."""
        self._accesses.check(self._host, reads, writes)

    @locked
    def tick(self):
        """The host does something that takes a while."""
        self._run(self._now + self._random.choice([0.0, 0.1, 1.0, 5.0]))

    # --- time ---

    def _issue(self):
        self.tick()
        self.current.after(self._host.clock)
        return self.current

    def _put(self, item):
        self.current.queue.append(item)
        self._at_work[self.current] = None

    @_disable_current_modes()
    def _run(self, until):
        while True:
            while any(self._begin(stream) for stream in tuple(self._at_work)):
                pass
            busy = [stream for stream in self._at_work if stream.busy_until is not None]
            first = min(busy, key=lambda stream: stream.busy_until, default=None)
            if first is None or first.busy_until > until:
                break
            self._now = first.busy_until
            self._end(first)
        self._now = until

    def _begin(self, stream):
        """Begin the stream's next item, if it is free to; return whether it was."""
        if stream.busy_until is not None:
            return False
        if not stream.queue:
            del self._at_work[stream]
            return False
        kind, what, *rest = stream.queue[0]
        if kind == "wait" and not what.happened:
            return False
        if kind == "kernel":
            output, inputs = rest
            result = what(*[tensor.clone() for tensor in inputs])
            stream.queue[0] = ("running", output, result)
            stream.busy_until = self._now + self._random.choice([0.1, 1.0, 10.0, 30.0])
            return True
        if kind == "record":
            what.happened = True
        stream.queue.popleft()
        return True

    @staticmethod
    def _end(stream):
        _, output, result = stream.queue.popleft()
        output.copy_(result)
        stream.busy_until = None


class Kernels(TorchDispatchMode):
    """Makes kernels on the current stream of every torch operation that is called within it, one for each result."""

    def __init__(self, simulation):
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:  # of numbers that the host has: copying them to a device blocks
            self._simulation.synchronize(self._simulation.record())
        if func.is_view:
            return func(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [leaves[place] for place in places]
        written = _written(func, args, kwargs)

        def run(*values):
            call = list(leaves)
            for place, value in zip(places, values, strict=True):
                call[place] = value
            again, named = tree_unflatten(call, tree)
            result = func(*again, **named)
            return result if written is None else _written(func, again, named)

        if written is not None:
            self._simulation.launch(run, written, *inputs)
            return written
        if func is torch.ops.aten.nonzero.default:  # the host waits for it, to know its size
            self._simulation.synchronize(self._simulation.record())
            self._simulation.host_access(inputs)
            likes = run(*inputs)
        else:
            likes = run(*(tensor.to("meta") for tensor in inputs))
        found, returned = tree_flatten(likes)
        outputs = [self._simulation.allocate(like.shape, like.dtype) for like in found]
        if "empty" not in func.name():
            for number, output in enumerate(outputs):
                self._simulation.launch(partial(_nth, run, number), output, *inputs)
        return tree_unflatten(outputs, returned)


def _nth(run, number, *values):
    return tree_flatten(run(*values))[0][number]


def _written(func, args, kwargs):
    """Return the tensor among the arguments that an operation writes to, None if it returns a new one."""
    arguments = func._schema.arguments
    for place, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return None


def _addresses(tensor):
    start, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    offsets = torch.zeros(1, dtype=torch.int64) + tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets.unsqueeze(1) + torch.arange(length) * stride).reshape(-1)
    return [start + offset * size for offset in offsets.tolist()]
