"""The one way through: a call comes in, a Work goes out.

A call is looked up by its key (operation, torch group, signature). The first call with a key is checked and routed, and
the route is kept; later ones cost one dict lookup.
"""

from __future__ import annotations

import atexit
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from deepspeed_mcrdl.agreement import agree
from deepspeed_mcrdl.backends.base import Job
from deepspeed_mcrdl.config import MCRDLConfig
from deepspeed_mcrdl.groups import Group, Groups
from deepspeed_mcrdl.messages import logger, set_up
from deepspeed_mcrdl.observe.log import CommunicationLog
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.routing.router import Key, Router
from deepspeed_mcrdl.safety import MonitoredBarrier, Progress, exchange
from deepspeed_mcrdl.transforms.contiguous import through_contiguous
from deepspeed_mcrdl.work import Work

Method = Callable[..., Work | None]

_started = itertools.count()


class Route(NamedTuple):
    """What a key leads to.

    Attributes:
        method: called as method(group, *arguments, async_op).
        group: the group of the call.
        check: run before every call, where the key alone does not vouch for the arguments.
    """

    method: Method
    group: Group
    check: Callable[..., None] | None


class Runtime:
    """Carries the calls of one job, from start to close; torch.distributed must be initialised.

    Args:
        config: this rank's "mcrdl" block.

    Raises:
        ConfigError: on every rank, if the ranks' configs differ or a backend that the config names can't be used.
    """

    def __init__(self, config: MCRDLConfig) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        set_up(self.rank)
        # A store can outlive a runtime; the ranks start their runtimes alike, so counting keeps the keys apart.
        store = PrefixStore(f"mcrdl/{next(_started)}", dist.distributed_c10d._get_default_store())
        hosts = exchange(store, "hosts", self.rank, self.world_size, socket.gethostname())
        self.progress = Progress()
        job = Job(store, self.rank, self.world_size, hosts, self.progress)
        self.groups = Groups(store, self.rank, hosts)
        self.backends, self.left_out = agree(config, job)
        self._close_at_exit = self.close
        atexit.register(self._close_at_exit)
        self._join(self.groups.world)
        self.router = Router(config.routing, {name: type(backend) for name, backend in self.backends.items()})
        self.monitored_barrier = MonitoredBarrier(self.groups, self.progress)
        self.log: CommunicationLog | None = None
        self._routes: dict[tuple[Any, ...], Route] = {}
        if config.banner and self.rank == 0:
            logger.info("%s", self.describe())

    def issue(
        self, operation: Operation, torch_group: Any, args: tuple[Any, ...], async_op: bool = False
    ) -> Work | None:
        """Carry out a call.

        Args:
            operation: an entry of the catalogue.
            torch_group: the torch process group; None for the world.
            args: the operation's arguments, as operations.py lists them.
            async_op: whether to return a Work at once.

        Returns:
            None when the call is done, else its Work.

        Raises:
            CallError: the arguments don't fit the operation and the group.
            UnsupportedError: no backend in use can do the call.
        """
        key = (operation, torch_group, *operation.signature(*args))
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._route(operation, self.groups.of(torch_group), args)
        method, group, check = route
        if check is not None:
            check(group, *args)
        return method(group, *args, async_op)

    def _route(self, operation: Operation, group: Group, args: tuple[Any, ...]) -> Route:
        operation.check(group, *args)
        backend = self.backends[self.router.decide(key_of(operation, group, args)).backend]
        method = backend.method(operation)
        inputs, outputs = operation.tensors(*args)
        if not all(t.is_contiguous() for t in (*inputs, *outputs)):
            method = through_contiguous(operation, method)
        if self.log is not None:
            method = self.log.timed(operation, backend.name, method)
        return Route(method, group, None if operation.checked_once(*args) else operation.check)

    def observe(self, log: CommunicationLog | None) -> None:
        """Record every call from now on in `log`; None stops recording."""
        self.log = log
        self._routes.clear()

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Make a torch process group and its communicators in every backend; every rank of the world calls this."""
        torch_group = dist.new_group(list(ranks))
        if torch_group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._join(self.groups.of(torch_group))
        return torch_group

    def adopt(self, torch_group: Any) -> None:
        """Make the communicators of a torch process group made elsewhere; every member calls this."""
        self._join(self.groups.of(torch_group))

    def _join(self, group: Group) -> None:
        for backend in self.backends.values():
            backend.join(group)

    def forget(self, torch_group: Any) -> None:
        """Free what the backends keep for a group that is being destroyed."""
        group = self.groups.discard(torch_group)
        if group is not None:
            for backend in self.backends.values():
                backend.leave(group)
            self._routes = {key: route for key, route in self._routes.items() if route.group is not group}

    def close(self) -> None:
        """End all backends; idempotent."""
        atexit.unregister(self._close_at_exit)
        backends, self.backends = self.backends, {}
        self._routes.clear()
        for backend in reversed(backends.values()):
            backend.close()
        self.groups.close()

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
