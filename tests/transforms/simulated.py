"""A simulated device, exact and without threads: streams of kernels of random length in virtual time.

Memory is real, read when a kernel begins and written when it ends. Every access is also held against the order that the
program has made (vector clocks), so that a race is raised wherever it is possible, whether or not this run shows it.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from contextlib import contextmanager

import torch

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
    """Memory that is used again as soon as nobody holds the tensor that was handed out, as by a caching allocator."""

    def __init__(self):
        self._free = {}
        self.slots = []

    def take(self, owner, shape, dtype):
        free = self._free.setdefault((owner, shape, dtype), [])
        if not free:
            free.append(torch.full(shape, -1, dtype=dtype))
            self.slots.append(free[-1])
        slot = free.pop()
        tensor = slot.detach()
        weakref.finalize(tensor, free.append, slot).atexit = False
        return tensor


class Simulation(Device):
    """A device, and the host that uses it.

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
        self.streams = [self._stream("stream") for _ in range(streams)]
        self._current = [self.streams[0]]

    def _stream(self, kind):
        self._made += 1
        return Stream(f"{kind} {self._made}")

    # --- the verbs ---

    def record(self):
        event = Event(self._issue().clock)
        self._put(("record", event))
        return event

    def wait(self, event):
        self._issue().after(event.clock)
        self._put(("wait", event))

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
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def copy(self, destination, source):
        self.launch(lambda value: value, destination, source)

    def host_buffer(self, like):
        return self._memory.take(HOST, like.shape, like.dtype)

    # --- what a program does ---

    @property
    def current(self):
        return self._current[-1]

    def empty(self, *shape):
        """Return memory of the current stream, which its own kernels may use at once."""
        return self._memory.take(self.current.name, torch.Size(shape), torch.int64)

    def launch(self, function, output, *inputs):
        """Issue the kernel output = function(*inputs) on the current stream."""
        stream = self._issue()
        self._accesses.check(stream, inputs, [output])
        # A queue on a device holds addresses; it keeps nothing alive.
        self._put(("kernel", function, output.detach(), [tensor.detach() for tensor in inputs]))

    def hold(self):
        """Make the current stream stand still until `release` is given the event that is returned."""
        event = Event({})
        self.wait(event)
        return event

    def release(self, event):
        event.happened = True

    def host_access(self, reads=(), writes=()):
        """The host reads and writes memory now."""
        self._accesses.check(self._host, reads, writes)

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


def _addresses(tensor):
    start, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    offsets = torch.zeros(1, dtype=torch.int64) + tensor.storage_offset()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets.unsqueeze(1) + torch.arange(length) * stride).reshape(-1)
    return [start + offset * size for offset in offsets.tolist()]
