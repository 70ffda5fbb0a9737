"""The one way through: a call comes in, a Work goes out.

A call is looked up by its key (operation, torch group, signature). The first call with a key is checked and routed, and
the route is kept; later ones cost one dict lookup.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from deepspeed_mcrdl.agreement import agree, agree_on_table
from deepspeed_mcrdl.arrivals import Arrivals, Meeting
from deepspeed_mcrdl.backends.base import START_TIMEOUT_S, Backend, Job, classes_of
from deepspeed_mcrdl.checked import Checked
from deepspeed_mcrdl.config import AUTO, MCRDLConfig
from deepspeed_mcrdl.errors import failed
from deepspeed_mcrdl.groups import Group, Groups, in_words
from deepspeed_mcrdl.machine import cores
from deepspeed_mcrdl.messages import logger, set_up
from deepspeed_mcrdl.observe.log import timed
from deepspeed_mcrdl.observe.record import ENVIRONMENT as RECORD
from deepspeed_mcrdl.observe.record import CallRecord
from deepspeed_mcrdl.observe.session import Session, WaitClock
from deepspeed_mcrdl.operations import ALL_TO_ALL, Operation
from deepspeed_mcrdl.routing.memory import Memory
from deepspeed_mcrdl.routing.online import Online, Trial, Verdict
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.routing.table import Fingerprint, Lookup
from deepspeed_mcrdl.safety import Call, MonitoredBarrier, Progress
from deepspeed_mcrdl.stores import Patient, exchange, second_connection
from deepspeed_mcrdl.streams import device_of
from deepspeed_mcrdl.transforms.chunk import Chunks
from deepspeed_mcrdl.transforms.compression.policy import Policy
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.transforms.fusion import Fusion
from deepspeed_mcrdl.transforms.hierarchical import Layouts, pairs
from deepspeed_mcrdl.transforms.staging import in_turn, through_host
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import DONE, Pending, Work, waiters

Method = Callable[..., Pending]
T = TypeVar("T")

_started = itertools.count()
_current: Runtime | None = None


class Observer(Protocol):
    """Sees every call of a runtime."""

    def timed(self, call: Call, args: tuple[Any, ...], carry: Callable[[], Work | None]) -> Work | None:
        """Return what `carry`, which carries the call out, returns."""


class Route(NamedTuple):
    """What a key leads to.

    Attributes:
        method: called as method(group, *arguments); returns a Pending.
        group: the group of the call.
        check: run before every call, where the key alone does not vouch for the arguments.
        backend: name of the backend, with the codec of compressed calls.
        collective: whether the call counts as a collective of its group.
        trial: what says at each call which of `choices` carries it, while backends are tried.
        choices: backend -> method.
    """

    method: Method
    group: Group
    check: Callable[..., None] | None
    backend: str
    collective: bool
    trial: Trial | None = None
    choices: Mapping[str, Method] = {}


class Runtime:
    """Carries the calls of one job, from start to close.

    Args:
        config: this rank's "mcrdl" block.
        store: the job's store.
        rank: this process's rank in the job.
        world_size: number of processes of the job.
        world: the torch process group of all ranks.
        timeout: how long a call may take where the config does not say.

    Raises:
        ConfigError: on every rank, if the ranks' configs differ or a backend that the config names can't be used.
    """

    def __init__(
        self, config: MCRDLConfig, store: Store, rank: int, world_size: int, world: Any, timeout: timedelta
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._observers: tuple[Observer, ...] = ()
        self._record: CallRecord | None = None
        self.session: Session | None = None
        self._store, self._quick_store = store, second_connection(store)
        self._timeout_s = timeout.total_seconds()
        set_up(rank)
        self._start(config, world)

    def _start(self, config: MCRDLConfig, world: Any) -> None:
        global _current
        rank, world_size = self.rank, self.world_size
        self.config = config
        timeout_s = config.timeout_s or self._timeout_s
        # A store can outlive a runtime; the ranks start their runtimes alike, so counting keeps the keys apart.
        prefix = f"mcrdl/{next(_started)}"
        store, quick_store = PrefixStore(prefix, self._store), PrefixStore(prefix, self._quick_store)
        hosts = exchange(quick_store, "hosts", rank, world_size, socket.gethostname(), max(timeout_s, START_TIMEOUT_S))
        self._arrivals = Arrivals(quick_store, rank)
        crowded = hosts.count(hosts[rank]) > cores()
        self.progress = (WaitClock if config.observe.anything else Progress)(timeout_s, self._arrivals, crowded)
        self.groups = Groups(Patient(quick_store), rank, hosts)
        self.groups.add(world, range(world_size), "world")
        self._routes: dict[tuple[Any, ...], Route] = {}
        self._turns: dict[str, Turns] = {}
        self._joined: set[tuple[str, Group]] = set()
        self._made: Counter[tuple[int, ...]] = Counter()
        self._online = self._memory = None
        self.backends, self.left_out = agree(config, Job(store, quick_store, rank, world_size, hosts, self.progress))
        layouts = Layouts(self.groups)
        classes = classes_of(self.backends)
        self.ways = self.backends | {
            name: pair(self.backends, layouts, self.fitted) for name, pair in pairs(classes).items()
        }
        self.fusion = self.chunks = self.compression = None
        self._close_at_exit = self.close
        atexit.register(self._close_at_exit)
        self.table = agree_on_table(config, quick_store, rank, world_size, self.backends, timeout_s)
        table = Lookup(self.table.table) if self.table else None
        if config.fusion is not None:
            self.fusion = Fusion(config.fusion, table, self.groups, self.progress)
        if config.chunk is not None:
            self.chunks = Chunks(config.chunk, table, self.groups, self.progress, self.fitted)
        if config.compression.codec is not None:
            self.compression = Policy(config.compression, self.ways, self.groups, self.progress, self.join, self.fitted)
        self.adopt(world)
        self.router = Router(config.routing, classes_of(self.ways), table)
        self.monitored_barrier = MonitoredBarrier(self.groups, self.progress)
        if config.tuning.mode == "online":
            self._online, self._memory = self._tune_online(quick_store)
        self._checked = Checked(quick_store, rank, self.progress) if config.checked else None
        if torch.cuda.is_available():
            self.progress.drive_in_background()  # a host that waits in CUDA, as in tensor.item(), drives nothing
        path = os.environ.get(RECORD, config.tuning.record)
        if path and rank == 0:
            self._record = CallRecord(Path(path))
            self.observe(self._record)
        if config.observe.anything:
            limit_s = max(timeout_s, START_TIMEOUT_S)
            self.session = Session(config.observe, quick_store, rank, world_size, limit_s, self._about(), self._why)
            self.observe(self.session)
        _current = self
        if config.banner and rank == 0:
            logger.info("%s", self.describe())

    def _tune_online(self, store: Store) -> tuple[Online, Memory]:
        tuning = self.config.tuning
        memory = Memory(tuning, self.world_size, Fingerprint.here(classes_of(self.backends)), self.table)
        online = Online(
            self.router, tuning.trials, tuning.retune_every, store, self.progress, memory.knows, self._settled
        )
        return online, memory

    def restart(self, config: MCRDLConfig) -> None:
        """Go on with another config, in every group made so far; every rank calls this at the same place."""
        # By number, an order that all ranks share: their own orders of first use would wait for each other.
        world, *others = sorted(self.groups, key=lambda group: group.number)
        groups = [(group.torch_group, group.ranks, group.name) for group in others]
        torch_group = world.torch_group
        self._stop()
        self._start(config, torch_group)
        for torch_group, ranks, name in groups:
            self.add_group(torch_group, ranks, name)

    def issue(
        self,
        operation: Operation,
        torch_group: Any,
        args: tuple[Any, ...],
        async_op: bool = False,
        backend: str = AUTO,
    ) -> Work | None:
        """Carry out one call.

        Args:
            operation: an entry of the catalogue.
            torch_group: a torch process group; None is the world.
            args: the operation's arguments, as listed in operations.py.
            async_op: whether to return a Work at once.
            backend: a backend's name, or "auto" for the one that the config, or else the router, chooses.

        Returns:
            A Work if `async_op`, else None when the call is done.

        Raises:
            CallError: if the arguments don't fit together.
            UnsupportedError: if no backend in use can do the call.
            CallTimeoutError: if a blocking call was not done within the config's "timeout_s".
            CallFailedError: if the backend raises an error.
        """
        key = (operation, torch_group, backend, *operation.signature(*args))
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._route(operation, self.groups.of(torch_group), args, backend)
        method, group, check, backend, collective, trial, choices = route
        if check is not None:
            check(group, *args)
        if collective:
            group.calls = number = group.calls + 1
        else:
            number = args[1]
        report = None
        if trial is not None:
            backend, report = trial.next()
            method = choices[backend]
        if report is not None or self._observers:
            return self._observed(method, Call(operation, group, backend, number), args, async_op, report)
        # As _carry, which costs a third of the time of a short call more.
        try:
            pending = method(group, *args)
        except Exception as error:
            raise failed(Call(operation, group, backend, number), error)  # noqa: B904 - it has its cause
        if pending is DONE and not async_op:
            return None
        return self._finish(pending, Call(operation, group, backend, number), async_op)

    def _observed(
        self,
        method: Method,
        call: Call,
        args: tuple[Any, ...],
        async_op: bool,
        report: Callable[[float], None] | None,
    ) -> Work | None:
        def carry() -> Work | None:
            return self._carry(method, call, args, async_op)

        if report is not None:
            carry = partial(_reported, carry, report)
        for observer in self._observers:
            carry = partial(observer.timed, call, args, carry)
        return carry()

    def _carry(self, method: Method, call: Call, args: tuple[Any, ...], async_op: bool) -> Work | None:
        try:
            pending = method(call.group, *args)
        except Exception as error:
            raise failed(call, error)  # noqa: B904 - it has its cause
        return self._finish(pending, call, async_op)

    def _finish(self, pending: Pending, call: Call, async_op: bool) -> Work | None:
        if async_op:
            return Work(pending, call, self.progress)
        if pending.stream_ordered:  # the host goes on before it is done; until then it is driven
            Work(pending, call, self.progress).wait()
        else:
            self.progress.finish(pending.poll, pending, call)
        return None

    def _route(self, operation: Operation, group: Group, args: tuple[Any, ...], wish: str) -> Route:
        operation.check(group, *args)
        key = key_of(operation, group, args)
        trial = self._online.trial(key, group) if self._online is not None and wish == AUTO else None
        if trial is not None and trial.verdict is not None and trial.over:
            wish, trial = trial.verdict.backend, None
        names = [self.router.decide(key, wish).backend] if trial is None else trial.candidates
        fused = self.fusion is not None and trial is None and self.fusion.takes(operation, group, args)
        found = {name: self._method(self.ways[name], operation, group, args, fused) for name in names}
        choices = {name: method for name, (method, _) in found.items()}
        check = None if operation.checked_once(*args) else operation.check
        method, carried_by = found[names[0]]
        return Route(method, group, check, carried_by, operation.collective, trial, choices)

    def _method(
        self, backend: Backend, operation: Operation, group: Group, args: tuple[Any, ...], fused: bool
    ) -> tuple[Method, str]:
        """Return how `backend` carries calls like this one, and what to call it."""
        name = backend.name
        if operation.collective:
            self._join_all(backend, group)
        if self.fusion is not None and fused and self.fusion.able(backend, group):
            method = self.fusion.method(backend, operation, group)
        else:
            compressed = cut = None
            if self.compression is not None:
                compressed = self.compression.method(backend, operation, group, args, key_of(operation, group, args))
            if compressed is None and self.chunks is not None:
                cut = self.chunks.method(backend, operation, group, args)
            method, name = compressed or (cut or self.fitted(backend, operation, group, args), name)
        if self.chunks is not None and operation.family == ALL_TO_ALL.family:
            method = self.chunks.first(self.ways.values(), method)
        return (method if self._checked is None else self._checked.around(operation, name, method)), name

    def fitted(self, backend: Backend, operation: Operation, group: Group, args: tuple[Any, ...]) -> Method:
        """Return the backend's method for arguments like these, with what they need before and after."""
        method = backend.method(operation, group, args)
        inputs, outputs = operation.tensors(*args)
        turns = self._turns.setdefault(backend.name, Turns())
        if any(t.device.type not in backend.devices for t in (*inputs, *outputs)):
            method = through_host(operation, method, device_of, turns)
        else:
            if not all(t.is_contiguous() for t in (*inputs, *outputs)):
                method = through_contiguous(operation, method)
            if torch.cuda.is_available() and "cuda" not in backend.devices:
                method = in_turn(operation, method, turns)
        return method

    def _settled(self, trial: Trial, verdict: Verdict) -> None:
        """A trial is over: its calls take the backend that stays, and the table for the next job is written."""
        if trial.over:
            self._routes = {key: route for key, route in self._routes.items() if route.trial is not trial}
        if self._memory is not None and trial.group.rank == 0:
            self._memory.note(trial, verdict, self._online.counts() if self._online else (1, 1))

    def observe(self, observer: Observer) -> None:
        """Show every call from now on to `observer`."""
        self._observers = (*self._observers, observer)

    def ignore(self, observer: Observer) -> None:
        """Show it no more calls."""
        self._observers = tuple(other for other in self._observers if other is not observer)

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Make a torch process group and its communicators in every backend; every rank of the world calls this."""
        torch_group = self.make_group(ranks, lambda: dist.new_group(list(ranks), timeout=self.limit))
        if torch_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.adopt(torch_group)
        return torch_group

    @property
    def limit(self) -> timedelta:
        """How long a call may take."""
        return timedelta(seconds=self.progress.timeout_s)

    def make_group(self, ranks: Sequence[int], make: Callable[[], T]) -> T:
        """Return what `make`, which has the same limit, makes of torch's for a group of `ranks`; drive meanwhile.

        Raises:
            CallTimeoutError: on a member, naming the members that did not come in time.
        """
        members = tuple(ranks)
        if self.rank not in members:
            return make()  # torch wants to be asked, and waits for nobody
        self._made[members] += 1
        meeting = Meeting(f"new {members} {self._made[members]}", members, members.index(self.rank))
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if cuda else None

        def on_device() -> T:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            return make()

        return self.progress.meet(on_device, f"a new group of ranks {in_words(members)}", meeting)

    def adopt(self, torch_group: Any) -> None:
        """Make the communicators of a torch process group made elsewhere; every member calls this."""
        for way in self.ways.values():
            self._join_all(way, self.groups.of(torch_group))

    def _join_all(self, backend: Backend, group: Group) -> None:
        """Make the communicators of a group in a backend, those of its fused calls and of chunks included."""
        self.join(backend, group)
        if self.fusion is not None and self.fusion.able(backend, group):
            self.join(backend, self.fusion.group_of(backend, group))
        for own in () if self.chunks is None else self.chunks.groups_of(backend, group):
            self.join(backend, own)

    def join(self, backend: Backend, group: Group) -> None:
        """Make the communicator of a group in a backend, once; every member calls this."""
        if (backend.name, group) not in self._joined and backend.misfit(group.mesh) is None:
            what = f"the communicator of {group} in the backend {backend.name}"
            meeting = Meeting(f"communicator {group.number}/{backend.name}", group.ranks, group.rank)
            self.progress.meet(lambda: backend.join(group), what, meeting)
            self._joined.add((backend.name, group))

    def add_group(self, torch_group: Any, ranks: Sequence[int], name: str) -> None:
        """Make a group that torch does not know yet, and its communicators; every member calls this."""
        self.groups.add(torch_group, ranks, name)
        self.adopt(torch_group)

    def forget(self, torch_group: Any) -> None:
        """Free what the backends keep for a group that is being destroyed; with the world, or None, everything ends."""
        if torch_group in (None, dist.group.WORLD):
            self.close()
            return
        group = self.groups.discard(torch_group)
        if group is not None:
            own = [] if self.fusion is None else self.fusion.leave(group)
            own += [] if self.compression is None else self.compression.leave(group)
            own += [] if self.chunks is None else self.chunks.leave(group)
            for way in self.ways.values():
                for left in (group, *own):
                    way.leave(left)
                    self._joined.discard((way.name, left))
            if self._online is not None:
                self._online.forget(group)
            self._routes = {key: route for key, route in self._routes.items() if route.group is not group}

    def close(self) -> None:
        """End all backends; idempotent."""
        global _current
        if _current is self:
            _current = None
        self._stop()
        self._store = self._quick_store = HashStore()  # let go of the job's, which keeps its port open

    def _stop(self) -> None:
        atexit.unregister(self._close_at_exit)
        if self._record is not None:
            self.ignore(self._record)
            self._record.write()
            self._record = None
        if self.compression is not None:
            self.compression.close()
        if self.session is not None:
            self.ignore(self.session)
            self.session.close()
            self.session = None
        fusion, self.fusion = self.fusion, None
        if fusion is not None:
            fusion.close()
        chunks, self.chunks = self.chunks, None
        if chunks is not None:
            chunks.close()
        ways, self.ways, self.backends = self.ways, {}, {}
        self._routes.clear()
        for way in reversed(ways.values()):
            way.close()
        self.groups.close()
        self._arrivals.close()
        self.progress.close()
        waiters.settle()

    def _about(self) -> dict[str, Any]:
        """Return what the files of a run say of the job."""
        return {
            "backends": {name: type(backend).version() for name, backend in self.backends.items()},
            "left_out": self.left_out,
            "table": f"{self.table.path} ({self.table.table.made})" if self.table else None,
        }

    def _why(self, call: Call, args: tuple[Any, ...]) -> str:
        """Return why the backend of a call carries it."""
        if call.backend not in self.ways:
            return f"compressed: {self.compression}"
        decision = self.router.decide(key_of(call.operation, call.group, args))
        return decision.why if decision.backend == call.backend else "named in the call, or tried by online tuning"

    def describe(self) -> str:
        """Return the block that rank 0 prints at the start."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = self.groups.world.mesh
        lines = [
            f"{self.world_size} ranks on {mesh.nodes} host{'s' if mesh.nodes > 1 else ''}, {len(self.groups)} group"
        ]
        for name, way in self.ways.items():
            if name in self.backends or way.misfit(mesh) is None:
                lines.append(f"backend {name}: {', '.join(filter(None, (type(way).version(), way.details())))}")
        lines += [f"left out {name}: {reason}" for name, reason in self.left_out.items()]
        lines += [f"route {name}: {', '.join(what)}" for name, what in self.router.map(device, mesh).items()]
        if self.config.fusion is not None:
            fused = ", ".join(self.config.fusion.operations)
            lines.append(f"fused: {fused} up to {self.config.fusion.max_call_bytes} B, on CPU tensors")
        if self.config.chunk is not None:
            chunk = self.config.chunk
            size = "as the table says, else by pairs alone" if chunk.max_bytes is None else f"of {chunk.max_bytes} B"
            cut = f"{', '.join(chunk.operations)} from {chunk.min_call_bytes} B"
            lines.append(f"in chunks {size}: {cut}, on CPU tensors")
        lines += [f"table: {self.table.path} ({self.table.table.made})" if self.table else "table: none"]
        lines += [] if self.compression is None else [f"compression: {self.compression}"]
        return "\n  ".join(lines)


def current() -> Runtime | None:
    """Return the runtime of this process: there is one, whatever faces call it."""
    return _current


def for_torch(config: MCRDLConfig, timeout: timedelta) -> Runtime:
    """Return the runtime of this process with `config`, started on the initialised torch.distributed if it must be."""
    if _current is None:
        store = dist.distributed_c10d._get_default_store()
        return Runtime(config, store, dist.get_rank(), dist.get_world_size(), dist.group.WORLD, timeout)
    if _current.config != config:
        _current.restart(config)
    return _current


def _reported(carry: Callable[[], Work | None], report: Callable[[float], None]) -> Work | None:
    """Report the seconds that the caller spends in the call and, if it is asynchronous, in its first wait."""
    spent: list[float] = []
    work = timed(carry, spent.append, lambda seconds: report(spent.pop() + seconds) if spent else None)
    if work is None:
        report(spent.pop())
    return work


def key_of(operation: Operation, group: Group, args: tuple[Any, ...]) -> Key:
    """Return what the route of a call may depend on."""
    inputs, outputs = operation.tensors(*args)
    tensor = next(iter((*inputs, *outputs)), None)
    return Key(
        operation=operation,
        kind=group.kind,
        dtype=None if tensor is None else tensor.dtype,
        device=None if tensor is None else tensor.device.type,
        op=args[-1] if operation.reduces else None,
        bytes=operation.routed_bytes(group, args),
        mesh=group.mesh,
    )
