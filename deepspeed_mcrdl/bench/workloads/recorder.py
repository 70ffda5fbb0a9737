"""What a training run cost: the time of its steps and of its communication, with and without the plugin alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.comm import comm

from deepspeed_mcrdl import operations as ops
from deepspeed_mcrdl.bench.workloads import WARM_UP_STEPS
from deepspeed_mcrdl.groups import Group, Mesh
from deepspeed_mcrdl.observe.log import CommunicationLog

# The catalogue entry and arguments of a call on DeepSpeed's backend object, by the method's name.
_CALLS: dict[str, tuple[ops.Operation, Callable[..., tuple[Any, ...]]]] = {
    "all_reduce": (ops.ALL_REDUCE, lambda tensor, *rest, **named: (tensor, "sum")),
    "reduce": (ops.REDUCE, lambda tensor, dst, *rest, **named: (tensor, dst, "sum")),
    "broadcast": (ops.BROADCAST, lambda tensor, src, *rest, **named: (tensor, src)),
    "all_gather": (ops.ALL_GATHER, lambda tensor_list, tensor, *rest, **named: (tensor_list, tensor)),
    "all_gather_into_tensor": (
        ops.ALL_GATHER_INTO_TENSOR,
        lambda output_tensor, input_tensor, *rest, **named: (output_tensor, input_tensor),
    ),
    "reduce_scatter_tensor": (
        ops.REDUCE_SCATTER_TENSOR,
        lambda output_tensor, input_tensor, *rest, **named: (output_tensor, input_tensor, "sum"),
    ),
    "all_to_all_single": (ops.ALL_TO_ALL_SINGLE, lambda output, input, *rest, **named: (output, input, None, None)),
    "send": (ops.SEND, lambda tensor, dst, *rest, **named: (tensor, dst, 0)),
    "recv": (ops.RECV, lambda tensor, src, *rest, **named: (tensor, src, 0)),
    "barrier": (ops.BARRIER, lambda *rest, **named: ()),
}


class Recorder:
    """Records steps after a warm-up; create it when communication is started.

    Args:
        tokens_per_step: tokens (of DLRM: samples) that all ranks together train on in a step.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._log = CommunicationLog()
        self._step_seconds: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._rows: list[dict[str, Any]] = []
        self._steps = 0
        if hasattr(comm.cdb, "runtime"):
            comm.cdb.runtime.observe(self._log)
        else:
            _observe_stock(comm.cdb, self._log)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one training step."""
        if self._steps == WARM_UP_STEPS:
            dist.barrier()
            self._log.reset()
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self._steps += 1
        if self._steps > WARM_UP_STEPS:
            self._step_seconds.append(elapsed)
            self._rows = self._log.rows()

    def loss(self, loss: torch.Tensor) -> None:
        """Keep a step's loss; it is read only at the end, so that no step waits for it."""
        self._losses.append(loss.detach().clone())

    def write(self, path: str | Path, held_out: tuple[float, float]) -> None:
        """Write the report of all ranks to `path` on rank 0; every rank calls it.

        Args:
            path: the JSON file.
            held_out: held-out loss before and after the steps.
        """
        own = {
            "communication": self._rows,
            "step_seconds": self._step_seconds,
            "losses": [loss.item() for loss in self._losses],
        }
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        if dist.get_rank() == 0:
            report = {
                "world_size": dist.get_world_size(),
                "tokens_per_step": self._tokens_per_step,
                "held_out": held_out,
                "ranks": everybody,
            }
            Path(path).write_text(json.dumps(report), encoding="utf-8")


def _observe_stock(backend: Any, log: CommunicationLog) -> None:
    """Time the calls of DeepSpeed's own backend object."""
    carrier = f"torch:{backend.get_backend()}"
    for name, (operation, arguments) in _CALLS.items():
        setattr(backend, name, _timed(getattr(backend, name), operation, arguments, carrier, log))


def _timed(
    method: Callable[..., Any],
    operation: ops.Operation,
    arguments: Callable[..., tuple[Any, ...]],
    carrier: str,
    log: CommunicationLog,
) -> Callable[..., Any]:
    # The catalogue's sizes need no more of a group than how many ranks it has.
    sizes: dict[Any, Group] = {}

    def call(*args: Any, **named: Any) -> Any:
        torch_group = named.get("group")
        group = sizes.get(torch_group)
        if group is None:
            count = dist.get_world_size(torch_group)
            group = sizes[torch_group] = Group(range(count), 0, "", 0, Mesh(1, count, 1), torch_group)
        start = time.perf_counter()
        work = method(*args, **named)
        elapsed = time.perf_counter() - start
        log.add(operation.name, carrier, operation.size(group, *arguments(*args, **named)), elapsed)
        if work is not None and hasattr(work, "wait"):
            return _TimedWait(work, lambda seconds: log.add(operation.name, carrier, 0, seconds, calls=0))
        return work

    return call


class _TimedWait:
    """torch's Work with its waits reported."""

    def __init__(self, work: Any, report: Callable[[float], None]) -> None:
        self._work = work
        self._report = report

    def wait(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._work.wait(*args)
        finally:
            self._report(time.perf_counter() - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
