"""The one way through: a call comes in, a Work goes out.

A call is looked up by its key (operation, torch group, signature). The first call with a key is checked and routed, and
the route is kept; later ones cost one dict lookup.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from deepspeed_mcrdl.agreement import agree
from deepspeed_mcrdl.arrivals import Arrivals
from deepspeed_mcrdl.backends.base import START_TIMEOUT_S, Backend, Job
from deepspeed_mcrdl.checked import Checked
from deepspeed_mcrdl.config import AUTO, MCRDLConfig
from deepspeed_mcrdl.errors import failed
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.messages import logger, set_up
from deepspeed_mcrdl.observe.log import CommunicationLog
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.safety import Call, MonitoredBarrier, Progress
from deepspeed_mcrdl.stores import exchange, second_connection
from deepspeed_mcrdl.streams import device_of
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.transforms.staging import Turns, in_turn, through_host
from deepspeed_mcrdl.work import Pending, Work

Method = Callable[..., Pending]

_started = itertools.count()
_current: Runtime | None = None


class Route(NamedTuple):
    """What a key leads to.

    Attributes:
        method: called as method(group, *arguments); returns a Pending.
        group: the group of the call.
        check: run before every call, where the key alone does not vouch for the arguments.
        backend: name of the backend.
        collective: whether the call counts as a collective of its group.
    """

    method: Method
    group: Group
    check: Callable[..., None] | None
    backend: str
    collective: bool


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
        crowded = hosts.count(hosts[rank]) > len(os.sched_getaffinity(0))
        self.progress = Progress(timeout_s, self._arrivals, crowded)
        self.groups = Groups(store, rank, hosts)
        self.groups.add(world, range(world_size), "world")
        self.backends, self.left_out = agree(config, Job(store, quick_store, rank, world_size, hosts, self.progress))
        self._turns: dict[str, Turns] = {}
        self._joined: set[tuple[str, Group]] = set()
        self._close_at_exit = self.close
        atexit.register(self._close_at_exit)
        self.adopt(world)
        self.router = Router(config.routing, {name: type(backend) for name, backend in self.backends.items()})
        self.monitored_barrier = MonitoredBarrier(self.groups, self.progress)
        self.log: CommunicationLog | None = None
        self._checked = Checked(quick_store, rank, self.progress) if config.checked else None
        self._routes: dict[tuple[Any, ...], Route] = {}
        if any("cuda" in backend.devices for backend in self.backends.values()):
            self.progress.drive_in_background()  # a host that waits in CUDA, as in tensor.item(), drives nothing
        _current = self
        if config.banner and rank == 0:
            logger.info("%s", self.describe())

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
        method, group, check, backend, collective = route
        if check is not None:
            check(group, *args)
        if collective:
            group.calls = number = group.calls + 1
        else:
            number = args[1]
        call = Call(operation, group, backend, number)
        if self.log is not None:
            return self.log.timed(call, args, lambda: self._carry(method, call, args, async_op))
        return self._carry(method, call, args, async_op)

    def _carry(self, method: Method, call: Call, args: tuple[Any, ...], async_op: bool) -> Work | None:
        try:
            pending = method(call.group, *args)
        except Exception as error:
            raise failed(call, error)  # noqa: B904 - it has its cause
        if async_op:
            return Work(pending, call, self.progress)
        if pending.stream_ordered:
            self.progress.finish(pending.orderable, pending, call)
            pending.order()
        else:
            self.progress.finish(pending.poll, pending, call)
        return None

    def _route(self, operation: Operation, group: Group, args: tuple[Any, ...], wish: str) -> Route:
        operation.check(group, *args)
        backend = self.backends[self.router.decide(key_of(operation, group, args), wish).backend]
        if operation.collective:
            self._join(backend, group)
        method = backend.method(operation)
        inputs, outputs = operation.tensors(*args)
        turns = self._turns.setdefault(backend.name, Turns())
        if any(t.device.type not in backend.devices for t in (*inputs, *outputs)):
            method = through_host(operation, method, device_of, turns)
        else:
            if not all(t.is_contiguous() for t in (*inputs, *outputs)):
                method = through_contiguous(operation, method)
            if torch.cuda.is_available() and "cuda" not in backend.devices:
                method = in_turn(operation, method, turns)
        if self._checked is not None:
            method = self._checked.around(operation, backend.name, method)
        check = None if operation.checked_once(*args) else operation.check
        return Route(method, group, check, backend.name, operation.collective)

    def observe(self, log: CommunicationLog | None) -> None:
        """Record every call from now on in `log`; None stops recording."""
        self.log = log

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Make a torch process group and its communicators in every backend; every rank of the world calls this."""
        torch_group = dist.new_group(list(ranks))
        if torch_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.adopt(torch_group)
        return torch_group

    def adopt(self, torch_group: Any) -> None:
        """Make the communicators of a torch process group made elsewhere; every member calls this."""
        for backend in self.backends.values():
            self._join(backend, self.groups.of(torch_group))

    def _join(self, backend: Backend, group: Group) -> None:
        if (backend.name, group) not in self._joined:
            what = f"the communicator of {group} in the backend {backend.name}"
            self.progress.run(lambda: backend.join(group), what)
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
            for backend in self.backends.values():
                backend.leave(group)
                self._joined.discard((backend.name, group))
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
        backends, self.backends = self.backends, {}
        self._routes.clear()
        for backend in reversed(backends.values()):
            backend.close()
        self.groups.close()
        self._arrivals.close()
        self.progress.close()

    def describe(self) -> str:
        """Return the block that rank 0 prints at the start."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = self.groups.world.mesh
        lines = [
            f"{self.world_size} ranks on {mesh.nodes} host{'s' if mesh.nodes > 1 else ''}, {len(self.groups)} group"
        ]
        lines += [f"backend {name}: {type(backend).version()}" for name, backend in self.backends.items()]
        lines += [f"left out {name}: {reason}" for name, reason in self.left_out.items()]
        lines += [f"route {name}: {', '.join(what)}" for name, what in self.router.map(device).items()]
        lines += ["table: none"]
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
    )
