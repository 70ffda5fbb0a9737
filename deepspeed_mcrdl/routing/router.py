"""Decides which backend carries a call, from what all ranks agree on alone: config, kind of group, declarations.

Order of the decision, first hit wins:
1. the config's rules for the group's kind, then its rules for all groups; in each: operation, family, default;
2. for "auto" and where no rule speaks: the tuning table (routing/table.py), if it speaks of the call;
3. the backend that prefers itself most among those that can do the call; for GPU tensors those that take them go before
   those that carry them through host memory.
A rule's backend that can't do a call is passed over, once with a word in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.config import AUTO, Routing, Rule
from deepspeed_mcrdl.errors import UnsupportedError, suggest
from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.messages import warn_once
from deepspeed_mcrdl.operations import OPERATIONS, Operation
from deepspeed_mcrdl.routing.table import Lookup

ONE_HOST = Mesh(nodes=1, ranks_per_node=2, stride=1)


@dataclass(frozen=True)
class Key:
    """What a route may depend on.

    Attributes:
        operation: the operation.
        kind: kind of the group, see groups.KINDS.
        dtype: dtype of the tensors, None if there are none.
        device: device type of the tensors, None if there are none.
        op: reduce operation, None if the operation has none.
        bytes: routed bytes, None where the ranks don't all know them; then the last step of a size list is taken.
        mesh: how the group lies on the hosts.
    """

    operation: Operation
    kind: str
    dtype: torch.dtype | None = None
    device: str | None = None
    op: str | None = None
    bytes: int | None = None
    mesh: Mesh = ONE_HOST

    def __str__(self) -> str:
        parts = [self.operation.name, self.op, self.dtype and str(self.dtype).removeprefix("torch."), self.device]
        return f"{' '.join(part for part in parts if part)} on a {self.kind} group"


@dataclass(frozen=True)
class Decision:
    """A backend's name and the reason why it was taken."""

    backend: str
    why: str


class Router:
    """Routes calls to the backends in use.

    Args:
        routing: the config's rules.
        backends: the backends in use by name, in order of preference.
        table: the tuning table in use, if there is one.
    """

    def __init__(
        self,
        routing: Routing,
        backends: Mapping[str, type[Backend]],
        table: Lookup | None = None,
    ) -> None:
        self._routing = routing
        self._backends = backends
        self._table = table

    def decide(self, key: Key, wish: str = AUTO) -> Decision:
        """Return the backend for `key`.

        Args:
            key: the call.
            wish: a backend's name, which goes before all rules and is not passed over.

        Raises:
            UnsupportedError: if no backend in use, or not the one wished for, can do the call; names what was tried.
        """
        if wish != AUTO:
            lack = self._lack(wish, key)
            if lack is not None:
                hint = suggest(wish, [*self._backends, AUTO]) if wish not in self._backends else ""
                raise UnsupportedError(f"{key}: the backend {wish} {lack}.{hint}")
            return Decision(wish, "named in the call")
        tried: dict[str, str] = {}
        pinned = self.pinned(key)
        if pinned is not None:
            lack = self._lack(pinned.backend, key)
            if lack is None:
                return pinned
            tried[pinned.backend] = lack
        elif (measured := self._measured(key)) is not None:
            return measured
        for staged in (False, True):
            for name in self._backends:
                lack = self._lack(name, key, staged)
                if lack is None:
                    refused = "; ".join(f"{other} {reason}" for other, reason in tried.items())
                    if pinned is not None:
                        warn_once(f"{key}: carried by {name}, because {refused}")
                    return Decision(name, "preference order" if not tried else f"preference order ({refused})")
                tried.setdefault(name, lack)
        raise UnsupportedError(
            f"no backend in use can do {key}: {'; '.join(f'{name} {lack}' for name, lack in tried.items())}"
        )

    def pinned(self, key: Key) -> Decision | None:
        """Return the backend that a rule of the config names for `key`; None: "auto" or no rule."""
        rule, place = self._rule(key)
        if rule is None:
            return None
        name, why = _resolve(rule, key.bytes, place)
        return None if name == AUTO else Decision(name, why)

    def able(self, key: Key) -> list[str]:
        """Return the backends that can carry `key`, in order of preference."""
        return [name for name in self._backends if self._lack(name, key) is None]

    def _measured(self, key: Key) -> Decision | None:
        entry = None if self._table is None else self._table.entry(key.operation, key.dtype, key.device, key.mesh)
        choice = None if entry is None else entry.choose(key.bytes, lambda name: self._lack(name, key) is None)
        return None if choice is None else Decision(*choice)

    def _rule(self, key: Key) -> tuple[Rule | None, str]:
        for rules, place in (
            (self._routing.groups.get(key.kind), f"routing.groups.{key.kind}"),
            (self._routing, "routing"),
        ):
            if rules is None:
                continue
            for name in (key.operation.name, key.operation.family):
                if name in rules.operations:
                    return rules.operations[name], f"{place}.{name}"
            if rules.default is not None:
                return rules.default, f"{place}.default"
        return None, ""

    def _lack(self, name: str, key: Key, staged: bool = True) -> str | None:
        """Return what a backend lacks for `key`; if `staged`, host memory will do for GPU tensors."""
        if name not in self._backends:
            return "is not in use"
        backend = self._backends[name]
        misfit = backend.misfit(key.mesh)
        if misfit is not None:
            return misfit
        device = "cpu" if staged and key.device == "cuda" and "cuda" not in backend.devices else key.device
        return backend.lacks(key.operation, key.dtype, device, key.op)

    def ranges(self, key: Key) -> list[tuple[int, int | None, Decision]]:
        """Return (first size, last size, decision) for all sizes of calls that are like `key`; the last has no end."""
        rule, _ = self._rule(key)
        entry = None if self._table is None else self._table.entry(key.operation, key.dtype, key.device, key.mesh)
        steps = [
            step for steps in (rule, entry and entry.steps) if steps and not isinstance(steps, str) for step in steps
        ]
        limits = sorted({step.max_bytes for step in steps if step.max_bytes is not None})
        found: list[tuple[int, int | None, Decision]] = []
        for first, last in zip([0, *(limit + 1 for limit in limits)], [*limits, None], strict=True):
            decision = self.decide(replace(key, bytes=first))
            if found and found[-1][2].backend == decision.backend:
                first = found.pop()[0]
            found.append((first, last, decision))
        return found

    def map(self, device: str, mesh: Mesh) -> dict[str, list[str]]:
        """Return backend -> what it carries of float32 calls on `device`, for the block printed at the start."""
        carried: dict[str, list[str]] = {}
        for operation in OPERATIONS.values():
            op = "sum" if operation.reduces else None
            key = Key(operation, "world", torch.float32, device, op, mesh=mesh)
            for first, last, decision in self.ranges(key):
                carried.setdefault(decision.backend, []).append(operation.name + size_label(first, last))
        return carried


def size_label(first: int, last: int | None) -> str:
    """Return a range of sizes in words, with a space before them; all sizes need none."""
    if last is None:
        return f" above {first - 1} B" if first else ""
    return f" {first} to {last} B" if first else f" up to {last} B"


def _resolve(rule: Rule, size: int | None, place: str) -> tuple[str, str]:
    if isinstance(rule, str):
        return rule, place
    for step in rule[:-1]:
        if size is not None and step.max_bytes is not None and size <= step.max_bytes:
            return step.backend, f"{place}, up to {step.max_bytes} bytes"
    return rule[-1].backend, place
