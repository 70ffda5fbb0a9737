"""Decides which backend carries a call, from what all ranks agree on alone: config, kind of group, declarations.

Order of the decision, first hit wins:
1. the config's rules for the group's kind, then its rules for all groups; in each: operation, family, default;
2. for "auto" and where no rule speaks: the tuning table, once there is one (`lookup`);
3. the backend that prefers itself most among those that can do the call; for GPU tensors those that take them go before
   those that carry them through host memory.
A rule's backend that can't do a call is passed over, once with a word in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepspeed_mcrdl.backends.base import Backend
from deepspeed_mcrdl.config import AUTO, Routing, Rule
from deepspeed_mcrdl.errors import UnsupportedError, suggest
from deepspeed_mcrdl.messages import warn_once
from deepspeed_mcrdl.operations import OPERATIONS, Operation


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
    """

    operation: Operation
    kind: str
    dtype: torch.dtype | None = None
    device: str | None = None
    op: str | None = None
    bytes: int | None = None

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
        lookup: key -> a backend's name by measurement, or None.
    """

    def __init__(
        self,
        routing: Routing,
        backends: Mapping[str, type[Backend]],
        lookup: Callable[[Key], str | None] = lambda key: None,
    ) -> None:
        self._routing = routing
        self._backends = backends
        self._lookup = lookup

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
        for name, why in self._wishes(key):
            lack = self._lack(name, key)
            if lack is None:
                if tried:
                    refused = "; ".join(f"{other} {reason}" for other, reason in tried.items())
                    warn_once(f"{key}: carried by {name}, because {refused}")
                return Decision(name, why)
            tried[name] = lack
        for staged in (False, True):
            for name in self._backends:
                lack = self._lack(name, key, staged)
                if lack is None:
                    refused = "; ".join(f"{other} {reason}" for other, reason in tried.items())
                    if tried:
                        warn_once(f"{key}: carried by {name}, because {refused}")
                    return Decision(name, "preference order" if not tried else f"preference order ({refused})")
                tried.setdefault(name, lack)
        raise UnsupportedError(
            f"no backend in use can do {key}: {'; '.join(f'{name} {lack}' for name, lack in tried.items())}"
        )

    def _wishes(self, key: Key) -> list[tuple[str, str]]:
        rule, place = self._rule(key)
        if rule is not None:
            name, why = _resolve(rule, key.bytes, place)
            if name != AUTO:
                return [(name, why)]
        measured = self._lookup(key)
        return [] if measured is None else [(measured, "table")]

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
        device = "cpu" if staged and key.device == "cuda" and "cuda" not in backend.devices else key.device
        return backend.lacks(key.operation, key.dtype, device, key.op)

    def map(self, device: str) -> dict[str, list[str]]:
        """Return backend -> what it carries of float32 calls on `device`, for the block printed at the start."""
        carried: dict[str, list[str]] = {}
        for operation in OPERATIONS.values():
            rule, _ = self._rule(Key(operation, "world"))
            op = "sum" if operation.reduces else None
            for limit, size in _steps(rule):
                decision = self.decide(Key(operation, "world", torch.float32, device, op, size))
                carried.setdefault(decision.backend, []).append(operation.name + limit)
        return carried


def _resolve(rule: Rule, size: int | None, place: str) -> tuple[str, str]:
    if isinstance(rule, str):
        return rule, place
    for step in rule[:-1]:
        if size is not None and step.max_bytes is not None and size <= step.max_bytes:
            return step.backend, f"{place}, up to {step.max_bytes} bytes"
    return rule[-1].backend, place


def _steps(rule: Rule | None) -> list[tuple[str, int | None]]:
    """Return (label, a size in that step) for each step of a rule."""
    if rule is None or isinstance(rule, str):
        return [("", None)]
    bounded = [step.max_bytes for step in rule if step.max_bytes is not None]
    labels = [(f" up to {limit} B", limit) for limit in bounded]
    return [*labels, (f" above {bounded[-1]} B" if bounded else "", None)]
