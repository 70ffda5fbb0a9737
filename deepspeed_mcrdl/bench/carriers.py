"""The ways to make a call that benchmarks compare: routed, on the backend object, and by other libraries' interfaces.

A carrier's name is what tables show: a backend ("mpi"), "auto", "direct:mpi" (the backend's method without routing),
"torch:gloo" (torch.distributed with a group of its own) or "mpi4py" (its buffer interface, blocking).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_mcrdl.bench.cases import Case, Issue
from deepspeed_mcrdl.config import AUTO
from deepspeed_mcrdl.errors import ConfigError, suggest
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import Operation
from deepspeed_mcrdl.runtime import Runtime
from deepspeed_mcrdl.safety import Call
from deepspeed_mcrdl.work import Pending, Work

DIRECT = "direct:"
TORCH = "torch:gloo"
MPI4PY = "mpi4py"

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

# torch.distributed's function and positional arguments for the arguments that operations.py lists. DeepSpeed's backend
# object has the same methods and orders.
_TORCH_CALLS: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "all_reduce": ("all_reduce", lambda tensor, op: (tensor, _TORCH_OPS[op])),
    "reduce": ("reduce", lambda tensor, dst, op: (tensor, dst, _TORCH_OPS[op])),
    "broadcast": ("broadcast", lambda tensor, src: (tensor, src)),
    "all_gather_into_tensor": ("all_gather_into_tensor", lambda output, input: (output, input)),
    "all_gather": ("all_gather", lambda outputs, input: (outputs, input)),
    "gather": ("gather", lambda outputs, input, dst: (input, outputs, dst)),
    "scatter": ("scatter", lambda output, inputs, src: (output, inputs, src)),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", lambda output, input, op: (output, input, _TORCH_OPS[op])),
    "reduce_scatter": ("reduce_scatter", lambda output, inputs, op: (output, inputs, _TORCH_OPS[op])),
    "all_to_all_single": (
        "all_to_all_single",
        lambda output, input, output_splits, input_splits: (output, input, output_splits, input_splits),
    ),
    "all_to_all": ("all_to_all", lambda outputs, inputs: (outputs, inputs)),
    "barrier": ("barrier", lambda: ()),
}


def carrier_names(runtime: Runtime) -> list[str]:
    """Return the names of all carriers in this job."""
    direct = [DIRECT + name for name in runtime.ways]
    return [*runtime.ways, AUTO, *direct, TORCH, *([MPI4PY] if "mpi" in runtime.backends else [])]


def carrier(name: str, runtime: Runtime, group: Group, torch_gloo: Any = None) -> Issue:
    """Return the carrier `name` for calls on `group`.

    Args:
        name: one of `carrier_names`.
        runtime: the runtime of the job.
        group: the group of the calls.
        torch_gloo: torch's gloo group of the same ranks, for "torch:gloo".

    Raises:
        ConfigError: on an unknown name, with the right word.
    """
    if name == AUTO or name in runtime.ways:
        return _routed(runtime, group, name)
    if name.startswith(DIRECT) and name.removeprefix(DIRECT) in runtime.ways:
        return _direct(runtime, group, name.removeprefix(DIRECT))
    if name == TORCH:
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names with a successor
        return by_torch(dist, torch_gloo)
    if name == MPI4PY and "mpi" in runtime.backends:
        return _mpi4py(group)
    raise ConfigError(f'unknown or unusable backend "{name}".{suggest(name, carrier_names(runtime))}')


def _routed(runtime: Runtime, group: Group, name: str) -> Issue:
    torch_group = group.torch_group

    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        return runtime.issue(operation, torch_group, args, async_op, name)

    return issue


def _direct(runtime: Runtime, group: Group, name: str) -> Issue:
    backend, progress = runtime.ways[name], runtime.progress
    methods: dict[tuple[Any, ...], Callable[..., Pending]] = {}  # a case's arguments are the same objects in each call

    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        key = operation, id(args)
        method = methods.get(key)
        if method is None:
            method = methods[key] = backend.method(operation, group, args)
        pending = method(group, *args)
        call = Call(operation, group, name, 0)
        if async_op:
            return Work(pending, call, progress)
        return progress.finish(pending.poll, pending, call)

    return issue


def by_torch(face: Any, torch_group: Any) -> Issue:
    """Return the carrier that calls torch.distributed, or DeepSpeed's backend object, as a script does."""

    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        if operation.name in ("send", "recv"):
            tensor, peer, tag = args
            return getattr(face, f"i{operation.name}")(tensor, peer, torch_group, tag)
        function, arguments = _TORCH_CALLS[operation.name]
        return getattr(face, function)(*arguments(*args), group=torch_group, async_op=async_op)

    return issue


def can_carry(name: str, case: Case) -> bool:
    """Return whether another library's interface has a case."""
    if name == TORCH:
        return all(operation.name in _TORCH_CALLS or not operation.collective for operation, _ in case.calls)
    plain = not case.operation.reduces or (case.dtype is torch.float32 and case.op in ("sum", "min", "max", "product"))
    return plain and all(operation.name in _MPI4PY_CALLS for operation, _ in case.calls)


def _mpi4py(group: Group) -> Issue:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    mpi_ops = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}

    def issue(operation: Operation, args: tuple[Any, ...], async_op: bool = False) -> Any:
        tensors = [MPI.memory.fromaddress(t.data_ptr(), t.nbytes) for t in args if isinstance(t, torch.Tensor)]
        kind = MPI.FLOAT if operation.reduces else MPI.BYTE
        buffers = [[memory, kind] for memory in tensors]
        op = mpi_ops[args[-1]] if operation.reduces else None
        root = operation.root(*args)
        return _MPI4PY_CALLS[operation.name](
            comm, MPI.IN_PLACE, buffers, op, None if root is None else group.index(root)
        )

    return issue


# The buffer interface's calls for the operations whose arguments are tensors.
_MPI4PY_CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, in_place, buffers, op, root: comm.Allreduce(in_place, buffers[0], op),
    "broadcast": lambda comm, in_place, buffers, op, root: comm.Bcast(buffers[0], root),
    "all_gather_into_tensor": lambda comm, in_place, buffers, op, root: comm.Allgather(buffers[1], buffers[0]),
    "reduce_scatter_tensor": lambda comm, in_place, buffers, op, root: comm.Reduce_scatter_block(
        buffers[1], buffers[0], op
    ),
    "all_to_all_single": lambda comm, in_place, buffers, op, root: comm.Alltoall(buffers[1], buffers[0]),
    "barrier": lambda comm, in_place, buffers, op, root: comm.Barrier(),
}
