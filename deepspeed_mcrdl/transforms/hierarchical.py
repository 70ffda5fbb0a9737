"""Operations of groups that span hosts, made of steps within the hosts by one backend and between them by another.

A pair of backends, such as "shm+mpi", is one more backend to the router. It carries these operations of groups with the
same number of ranks, two or more, on each of two or more hosts:

======================  =======================  ========================  =======================
operation               within the hosts         between them              within the hosts
======================  =======================  ========================  =======================
all_reduce              reduce_scatter_tensor    all_reduce                all_gather_into_tensor
reduce_scatter_tensor   reduce_scatter_tensor    reduce_scatter_tensor
reduce_scatter          reduce_scatter           reduce_scatter
all_gather_into_tensor                           all_gather_into_tensor    all_gather_into_tensor
all_gather                                       all_gather                all_gather
broadcast                                        broadcast                 broadcast
all_to_all_single       all_to_all_single        all_to_all_single
all_to_all              all_to_all_single        all_to_all_single
======================  =======================  ========================  =======================

Between hosts each rank meets the ranks that have its place on their hosts. An all-to-all thus sends to each other host
one message where it would send one to each of its ranks (the two-dimensional form of Tutel, arXiv 2206.03382, and
HetuMoE, arXiv 2203.14685).

What only moves data gives the same bits as any backend. A reduction first combines the ranks of each host, in the order
of the inner backend, then the hosts, in that of the outer one; all ranks get the same bits if they do from both. An
average is a sum, divided at the end.

The steps of one call start one after the other, those of several calls on one group in the order of the calls
(`Turns`): each step has a communicator of its own, and its ranks see one order there, whatever the steps before took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.aside import Aside
from deepspeed_mcrdl.backends.base import Backend, apart, divide, joined, spread
from deepspeed_mcrdl.config import PAIR
from deepspeed_mcrdl.groups import Group, Groups, Mesh
from deepspeed_mcrdl.operations import Operation, counts
from deepspeed_mcrdl.streams import device_of
from deepspeed_mcrdl.transforms.steps import Fit, Step, chain
from deepspeed_mcrdl.transforms.turns import Turns
from deepspeed_mcrdl.work import Pending, Together

# What an operation needs of the inner and of the outer backend.
_NEEDS: dict[Operation, tuple[Sequence[Operation], Sequence[Operation]]] = {
    ops.ALL_REDUCE: ((ops.REDUCE_SCATTER_TENSOR, ops.ALL_GATHER_INTO_TENSOR), (ops.ALL_REDUCE,)),
    ops.BROADCAST: ((ops.BROADCAST,), (ops.BROADCAST,)),
    ops.ALL_GATHER_INTO_TENSOR: ((ops.ALL_GATHER_INTO_TENSOR,), (ops.ALL_GATHER_INTO_TENSOR,)),
    ops.ALL_GATHER: ((ops.ALL_GATHER,), (ops.ALL_GATHER,)),
    ops.REDUCE_SCATTER_TENSOR: ((ops.REDUCE_SCATTER_TENSOR,), (ops.REDUCE_SCATTER_TENSOR,)),
    ops.REDUCE_SCATTER: ((ops.REDUCE_SCATTER,), (ops.REDUCE_SCATTER,)),
    ops.ALL_TO_ALL_SINGLE: ((ops.ALL_TO_ALL_SINGLE,), (ops.ALL_TO_ALL_SINGLE,)),
    ops.ALL_TO_ALL: ((ops.ALL_TO_ALL_SINGLE,), (ops.ALL_TO_ALL_SINGLE,)),
}
_DIRECT_BYTES = 64 * 1024  # of a block, from which on a copy costs more than a step for each host
_PREFERENCE = 1000  # taken where a rule, a table or a trial says so


class Layout:
    """How a group that spans hosts lies on them, seen from this rank.

    Attributes:
        inner: this host's ranks of the group.
        again: the same ranks, for steps after those between hosts.
        outer: the ranks that have this rank's place on each of the hosts.
        host: the number of this rank's host.
        nodes: number of hosts.
        local: ranks on each host.
        places: for each place on a host, for each host: the place in the group.
        by_host: for each host, for each place on it: the place in the group.
        in_order: whether that is the order of the group.
        in_places: for each place in the group: where it stands in `places`.
        in_hosts: for each place in the group: where it stands in `by_host`.
    """

    def __init__(self, group: Group, groups: Groups) -> None:
        by_host: dict[str, list[int]] = {}
        for place, rank in enumerate(group.ranks):
            by_host.setdefault(groups.hosts[rank], []).append(place)
        hosts = list(by_host.values())
        self.host = host = next(number for number, places in enumerate(hosts) if group.rank in places)
        own = hosts[host].index(group.rank)
        self.nodes, self.local = len(hosts), len(hosts[0])
        self.places = [places[local] for local in range(self.local) for places in hosts]
        self.by_host = [place for places in hosts for place in places]
        self.in_order = self.by_host == list(range(group.size))
        self.in_places = [self.places.index(place) for place in range(group.size)]
        self.in_hosts = [self.by_host.index(place) for place in range(group.size)]
        self.inner = self._part(group, groups, hosts[host], f"within host {host}")
        self.again = self._part(group, groups, hosts[host], f"within host {host} again")
        self.outer = self._part(group, groups, [places[own] for places in hosts], f"between hosts {own}")

    @property
    def parts(self) -> tuple[Group, Group, Group]:
        """The groups that it is made of."""
        return self.inner, self.again, self.outer

    @staticmethod
    def _part(group: Group, groups: Groups, places: Sequence[int], what: str) -> Group:
        return groups.make([group.ranks[place] for place in places], f"{group.name}/{group.number} {what}")


def _in_order(tensor: torch.Tensor, order: Sequence[int], output: torch.Tensor | None = None) -> torch.Tensor:
    """Return the equal blocks of `tensor` in another order, in `output` if there is one."""
    # A list of numbers on a GPU would be copied there, which blocks.
    blocks = tensor.view(len(order), tensor.numel() // len(order)).unbind()
    return torch.cat([blocks[number] for number in order], out=output)


class Layouts:
    """The layouts of this process's groups. Pairs of backends share them with their communicators, and so the order in
    which steps start.

    Args:
        groups: the groups of the job.
    """

    def __init__(self, groups: Groups) -> None:
        self.turns = Turns()
        self._groups = groups
        self._found: dict[Group, Layout] = {}
        self._joined: set[tuple[str, Group]] = set()

    def of(self, group: Group) -> Layout:
        """Return the layout of a group, made in its first call; every member makes it."""
        if group not in self._found:
            self._found[group] = Layout(group, self._groups)
        return self._found[group]

    def join(self, backend: Backend, part: Group) -> None:
        """Make the communicator of a part of a group, once."""
        if (backend.name, part) not in self._joined:
            backend.join(part)
            self._joined.add((backend.name, part))

    def leave(self, group: Group, backends: Sequence[Backend]) -> None:
        """Free the communicators that `backends` have of a group's parts."""
        layout = self._found.get(group)
        if layout is None:
            return
        for part in layout.parts:
            for backend in backends:
                if (backend.name, part) in self._joined:
                    backend.leave(part)
                    self._joined.discard((backend.name, part))
        if not any(part in layout.parts for _, part in self._joined):
            del self._found[group]


class Hierarchical(Backend):
    """A pair of backends as one. `pairs` makes the subclasses.

    Args:
        parts: the backends in use, by name.
        layouts: those of this process.
        fit: (backend, operation, group, arguments) -> the backend's method for them, with what it needs before and
            after.

    Class attributes:
        inner: carries the steps within hosts.
        outer: carries those between hosts.
    """

    preference = _PREFERENCE
    inner: ClassVar[type[Backend]]
    outer: ClassVar[type[Backend]]

    def __init__(self, parts: Mapping[str, Backend], layouts: Layouts, fit: Fit) -> None:
        self._inner, self._outer = parts[self.inner.name], parts[self.outer.name]
        self._layouts = layouts
        self._fit = fit

    @classmethod
    def unusable(cls) -> str | None:
        return None

    @classmethod
    def version(cls) -> str:
        return f"{cls.inner.name} within hosts, {cls.outer.name} between them"

    @classmethod
    def lacks(cls, operation: Operation, dtype: torch.dtype | None, device: str | None, op: str | None) -> str | None:
        if operation not in _NEEDS:
            return f"has no {operation.name}"
        if device not in cls.devices:
            return f"takes no {device} tensors"
        for backend, steps in zip((cls.inner, cls.outer), _NEEDS[operation], strict=True):
            place = device if device in backend.devices else "cpu"
            for step in steps:
                lack = backend.lacks(step, dtype, place, op if step.reduces else None)
                if lack is not None:
                    return f"{lack} ({backend.name})"
        return None

    @classmethod
    def misfit(cls, mesh: Mesh) -> str | None:
        fits = mesh.nodes > 1 and mesh.ranks_per_node > 1
        return None if fits else "carries calls of groups with the same number of ranks, at least 2, on several hosts"

    def join(self, group: Group) -> None:
        layout = self._layouts.of(group)
        self._layouts.join(self._inner, layout.inner)
        self._layouts.join(self._inner, layout.again)
        self._layouts.join(self._outer, layout.outer)

    def leave(self, group: Group) -> None:
        self._layouts.leave(group, (self._inner, self._outer))

    def close(self) -> None:
        """Its parts end by themselves."""

    def _within(self, part: Group, operation: Operation, arguments: Callable[[], tuple[Any, ...]]) -> Step:
        return Step(self._inner, part, operation, arguments)

    def _between(self, part: Group, operation: Operation, arguments: Callable[[], tuple[Any, ...]]) -> Step:
        return Step(self._outer, part, operation, arguments)

    def _run(
        self,
        tensor: torch.Tensor,
        steps: Sequence[Step],
        finish: Callable[[], object] | None = None,
        reads: bool = False,
    ) -> Pending:
        device = device_of(tensor)
        aside = None if device is None else Aside(device, reads=reads)
        return chain(self._layouts.turns, self._fit, steps, finish, aside)

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        at = self._layouts.of(group)
        flat = tensor.detach().view(-1)
        whole = flat
        part = flat.new_empty(-(-flat.numel() // at.local))
        if part.numel() * at.local != flat.numel():
            whole = flat.new_zeros(part.numel() * at.local)
            whole[: flat.numel()] = flat
        steps = (
            self._within(at.inner, ops.REDUCE_SCATTER_TENSOR, lambda: (part, whole, _summed(op))),
            self._between(at.outer, ops.ALL_REDUCE, lambda: (part, _summed(op))),
            self._within(at.again, ops.ALL_GATHER_INTO_TENSOR, lambda: (whole, part)),
        )

        def finish() -> None:
            if whole is not flat:
                flat.copy_(whole[: flat.numel()])
            if op == "avg":
                divide(flat, group.size)

        return self._run(flat, steps, finish)

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int) -> Pending:
        at = self._layouts.of(group)
        number = at.places.index(group.index(src)) // at.nodes  # the root's place on its host
        root = at.again.ranks[number]
        steps = [self._within(at.again, ops.BROADCAST, lambda: (tensor, root))]
        if at.again.rank == number:
            steps.insert(0, self._between(at.outer, ops.BROADCAST, lambda: (tensor, src)))
        return self._run(tensor, steps)

    def all_gather_into_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
        at = self._layouts.of(group)
        own, target = _bytes(input), _bytes(output)
        column = own.new_empty(own.numel() * at.nodes)
        if at.in_order and own.numel() >= _DIRECT_BYTES:
            return self._gather_by_host(at, target.view(at.nodes, -1), column.view(at.nodes, -1), own)
        whole = own.new_empty(target.numel())
        steps = (
            self._between(at.outer, ops.ALL_GATHER_INTO_TENSOR, lambda: (column, own)),
            self._within(at.again, ops.ALL_GATHER_INTO_TENSOR, lambda: (whole, column)),
        )
        return self._run(target, steps, lambda: _in_order(whole, at.in_places, target))

    def _gather_by_host(self, at: Layout, rows: torch.Tensor, column: torch.Tensor, own: torch.Tensor) -> Pending:
        """Gather the blocks of each host straight to their place, those of this host while others are on their way."""

        def gather(part: Group, host: int, block: torch.Tensor) -> Step:
            return self._within(part, ops.ALL_GATHER_INTO_TENSOR, lambda: (rows[host], block))

        in_place = own.data_ptr() == rows[at.host].data_ptr() + at.inner.rank * own.numel()
        own = own if in_place else apart(own, (rows,))
        here = self._run(own, [gather(at.inner, at.host, own)])
        others = [gather(at.again, host, column[host]) for host in range(at.nodes) if host != at.host]
        between = self._between(at.outer, ops.ALL_GATHER_INTO_TENSOR, lambda: (column.view(-1), own))
        return Together([self._run(own, [between, *others]), here])

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor) -> Pending:
        at = self._layouts.of(group)
        in_order = [outputs[place] for place in at.places]
        of_place = [in_order[start : start + at.nodes] for start in range(0, group.size, at.nodes)]
        column = [output.new_empty(output.numel()) for output in of_place[at.inner.rank]]
        columns = [input.new_empty(sum(output.numel() for output in of_one)) for of_one in of_place]
        steps = (
            self._between(at.outer, ops.ALL_GATHER, lambda: (column, input)),
            self._within(at.again, ops.ALL_GATHER, lambda: (columns, joined(column))),
        )
        return self._run(input, steps, lambda: spread(joined(columns), in_order))

    def reduce_scatter_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
        at = self._layouts.of(group)
        flat = input.detach().view(-1)
        whole = _in_order(flat, at.places)
        column = flat.new_empty(output.numel() * at.nodes)
        steps = (
            self._within(at.inner, ops.REDUCE_SCATTER_TENSOR, lambda: (column, whole, _summed(op))),
            self._between(at.outer, ops.REDUCE_SCATTER_TENSOR, lambda: (output, column, _summed(op))),
        )
        return self._run(output, steps, (lambda: divide(output, group.size)) if op == "avg" else None)

    def reduce_scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Pending:
        at = self._layouts.of(group)
        in_order = [inputs[place] for place in at.places]
        columns = [joined(in_order[start : start + at.nodes]) for start in range(0, group.size, at.nodes)]
        column = torch.empty_like(columns[at.inner.rank])
        sizes = [input.numel() for input in in_order[at.inner.rank * at.nodes :][: at.nodes]]
        steps = (
            self._within(at.inner, ops.REDUCE_SCATTER, lambda: (column, columns, _summed(op))),
            self._between(
                at.outer, ops.REDUCE_SCATTER, lambda: (output, list(torch.split(column, sizes)), _summed(op))
            ),
        )
        return self._run(output, steps, (lambda: divide(output, group.size)) if op == "avg" else None)

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        source, target = _bytes(input), _bytes(output)
        if output_splits is not None or input_splits is not None:
            sent = torch.split(source, _in_bytes(input, input_splits, group))
            received = torch.split(target, _in_bytes(output, output_splits, group))
            return self._exchange(group, received, sent)
        at = self._layouts.of(group)
        whole = _in_order(source, at.places)
        middle = torch.empty_like(whole)
        arrived = target if at.in_order else torch.empty_like(target)

        def by_host() -> torch.Tensor:
            block = middle.numel() // group.size
            return middle.view(at.local, at.nodes, block).transpose(0, 1).reshape(-1)

        steps = (
            self._within(at.inner, ops.ALL_TO_ALL_SINGLE, lambda: (middle, whole, None, None)),
            self._between(at.outer, ops.ALL_TO_ALL_SINGLE, lambda: (arrived, by_host(), None, None)),
        )
        return self._run(target, steps, None if at.in_order else lambda: _in_order(arrived, at.in_hosts, target))

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        return self._exchange(group, [_bytes(output) for output in outputs], [_bytes(input) for input in inputs])

    def _exchange(self, group: Group, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Pending:
        """Send a part of any size to each place of the group and receive one from each, all as bytes."""
        at = self._layouts.of(group)
        in_order = [sent[place] for place in at.places]
        whole = joined(in_order)
        told, heard = whole.new_empty((2, group.size), dtype=torch.int64)
        device = device_of(told)
        counted = told if device is None else device.host_buffer(told)
        counted.numpy()[:] = [part.numel() for part in in_order]
        middle, arrived = whole.new_empty(0), whole.new_empty(sum(part.numel() for part in received))

        def tell() -> tuple[Any, ...]:
            if device is not None:
                device.copy(told, counted)
            return heard, told, None, None

        def through_host() -> tuple[Any, ...]:
            nonlocal middle
            taken, given = _sums(heard.tolist(), at.nodes), _sums(counted.tolist(), at.nodes)
            middle = whole.new_empty(sum(taken))
            return middle, whole, taken, given

        def to_hosts() -> tuple[Any, ...]:
            parts = torch.split(middle, heard.tolist())
            by_host = [parts[local * at.nodes + node] for node in range(at.nodes) for local in range(at.local)]
            taken = _sums([received[place].numel() for place in at.by_host], at.local)
            return arrived, joined(by_host), taken, _sums([part.numel() for part in by_host], at.local)

        steps = (
            # How large the parts are that this rank hands on, only their senders know.
            self._within(at.again, ops.ALL_TO_ALL_SINGLE, tell),
            self._within(at.inner, ops.ALL_TO_ALL_SINGLE, through_host),
            self._between(at.outer, ops.ALL_TO_ALL_SINGLE, to_hosts),
        )
        return self._run(arrived, steps, lambda: spread(arrived, [received[place] for place in at.by_host]), reads=True)


def pairs(backends: Mapping[str, type[Backend]]) -> dict[str, type[Hierarchical]]:
    """Return the pairs of some backends, by name: the inner one is of one host or of GPUs, the outer one is neither."""
    found = {}
    for inner in backends.values():
        if not (inner.one_host or "cuda" in inner.devices):
            continue
        for outer in backends.values():
            if outer.one_host or "cuda" in outer.devices:
                continue
            name = f"{inner.name}{PAIR}{outer.name}"
            attributes = {"name": name, "devices": inner.devices, "inner": inner, "outer": outer}
            found[name] = type("Pair", (Hierarchical,), attributes)
    return found


def _summed(op: str) -> str:
    """Return the reduce operation of the steps: an average is a sum, divided once at the end."""
    return "sum" if op == "avg" else op


def _sums(sizes: Sequence[int], count: int) -> list[int]:
    """Return the sums of each `count` sizes."""
    return [sum(sizes[first : first + count]) for first in range(0, len(sizes), count)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _in_bytes(tensor: torch.Tensor, splits: Sequence[int] | None, group: Group) -> list[int]:
    return [count * tensor.element_size() for count in counts(tensor, splits, group.size)]
