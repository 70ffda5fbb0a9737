"""What a backend is: data that says what it can do, and one method for each operation that it has.

A backend is a class named by an entry point in the group "deepspeed_mcrdl.backends"; a new one changes no other file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Store

from deepspeed_mcrdl.errors import CallError, MCRDLError
from deepspeed_mcrdl.groups import Group, Mesh
from deepspeed_mcrdl.operations import OPERATIONS, Operation
from deepspeed_mcrdl.safety import Progress
from deepspeed_mcrdl.work import Pending

ENTRY_POINT_GROUP = "deepspeed_mcrdl.backends"
MESSAGE_TAGS = 2**16
START_TIMEOUT_S = 60.0

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
COMPLEX = frozenset({torch.complex64, torch.complex128})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
MOVABLE = FLOATS | INTEGERS | COMPLEX | FP8 | {torch.bool}
ARITHMETIC_OPS = frozenset({"sum", "min", "max", "product"})
BIT_OPS = frozenset({"band", "bor", "bxor"})


@dataclass(frozen=True)
class Job:
    """What a backend is given to start with.

    Attributes:
        store: the job's store, to wait for keys in.
        quick_store: the same by another connection, in which nobody waits.
        rank: this process's global rank.
        world_size: number of processes.
        hosts: hostname of every rank.
        progress: who waits, and drives unfinished operations.
    """

    store: Store
    quick_store: Store
    rank: int
    world_size: int
    hosts: Sequence[str]
    progress: Progress

    @property
    def start_timeout_s(self) -> float:
        """How long a rank waits for the others at the start, which they may come to at different times."""
        return max(self.progress.timeout_s, START_TIMEOUT_S)


class Backend(ABC):
    """One way to carry operations.

    For each operation of the catalogue that it has, a subclass has a method of that name. It is called as
    ``method(group, *arguments)`` with the arguments that operations.py lists, checked already, every tensor contiguous
    and on one device. It starts the operation without blocking and returns a Pending.

    Class attributes are the declaration that routing reads; it must not depend on the rank:
        name: what a config calls it.
        preference: "auto" takes the usable backend with the lowest number.
        devices: device types whose tensors it takes.
        dtypes: dtypes that it can move.
        reductions: dtype -> reduce operations that it computes rightly.
        one_host: whether it carries only calls of groups whose ranks are all on one host.
    """

    name: ClassVar[str]
    preference: ClassVar[int]
    devices: ClassVar[frozenset[str]]
    dtypes: ClassVar[frozenset[torch.dtype]]
    reductions: ClassVar[Mapping[torch.dtype, frozenset[str]]]
    one_host: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def unusable(cls) -> str | None:
        """Return why this backend can't work in this process, or None. Starts nothing."""

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return the carrying library and its version; called only where the backend is usable."""

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Start the backend; every rank of the job does so at the same place."""

    @abstractmethod
    def join(self, group: Group) -> None:
        """Make the communicator of `group`. Every member calls it once, before the group's first collective; the world
        comes first, if the backend fits how it lies on the hosts. It may block until all have come, and runs in a
        thread of its own."""

    @abstractmethod
    def leave(self, group: Group) -> None:
        """Free the communicator of `group`, if it was made."""

    @abstractmethod
    def close(self) -> None:
        """End the backend; must not hang when peers are gone."""

    @classmethod
    def lacks(cls, operation: Operation, dtype: torch.dtype | None, device: str | None, op: str | None) -> str | None:
        """Return what of a call this backend can't do, or None if it can do the call.

        Args:
            operation: the operation.
            dtype: dtype of the tensors; None if there are none.
            device: device type of the tensors; None if there are none.
            op: reduce operation; None if the operation has none.
        """
        if not hasattr(cls, operation.name):
            return f"has no {operation.name}"
        if device is not None and device not in cls.devices:
            return f"takes no {device} tensors"
        if op is not None and dtype is not None and op not in cls.reductions.get(dtype, ()):
            return f"has no {op} of {dtype}"
        if op is None and dtype is not None and dtype not in cls.dtypes:
            return f"can't move {dtype}"
        return None

    @classmethod
    def misfit(cls, mesh: Mesh) -> str | None:
        """Return why this backend can't carry calls of groups that lie so on the hosts, or None if it can."""
        return "carries calls within one host only" if cls.one_host and mesh.nodes > 1 else None

    def details(self) -> str:
        """Return what there is to say of it beside its version, such as how it was started."""
        return ""

    def method(self, operation: Operation, group: Group, args: tuple[Any, ...]) -> Callable[..., Pending]:
        """Return what carries calls of `operation` on `group` whose arguments have the signature of `args`.

        It is looked up once for such calls. A backend whose calls are so short that it matters can give out something
        with all that the signature settles looked up; it is not called any more when the group has been left.
        """
        method: Callable[..., Pending] = getattr(self, operation.name)
        return method

    @classmethod
    def operations(cls) -> list[str]:
        """Return the names of the operations that it has."""
        return [name for name in OPERATIONS if hasattr(cls, name)]


def message_tag(group: Group, tag: int, max_tag: int) -> int:
    """Return the tag that keeps a message of `group` apart from those of other groups on a shared communicator.

    Args:
        group: the group that the message belongs to.
        tag: the caller's tag, 0 <= tag < 2**16.
        max_tag: the largest tag that the communicator takes.

    Raises:
        CallError: if the caller's tag or the number of groups is too large for that.
    """
    combined = group.number * MESSAGE_TAGS + tag
    if not 0 <= tag < MESSAGE_TAGS or combined > max_tag:
        raise CallError(
            f"tag {tag} on {group}: tags must be from 0 to {MESSAGE_TAGS - 1}, "
            f"in at most {max_tag // MESSAGE_TAGS} groups"
        )
    return combined


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy what `joined` has put together into `outputs`."""
    with torch.no_grad():
        for output, part in zip(outputs, torch.split(flat, [t.numel() for t in outputs]), strict=True):
            output.copy_(part.view_as(output))


def divide(tensor: torch.Tensor, size: int) -> None:
    """Make an average of a sum over `size` ranks."""
    with torch.no_grad():
        # Part by part: torch divides complex numbers less exactly.
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).div_(size)


def apart(input: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `input`, or a copy of it if it shares memory with an output, which would be written too early."""
    start, end = input.data_ptr(), input.data_ptr() + input.nbytes
    for output in outputs:
        if start < output.data_ptr() + output.nbytes and output.data_ptr() < end:
            return input.clone()
    return input


def classes_of(backends: Mapping[str, Backend]) -> dict[str, type[Backend]]:
    """Return name -> class of started backends."""
    return {name: type(backend) for name, backend in backends.items()}


def installed() -> dict[str, type[Backend]]:
    """Return the backend classes that are installed, by name, in order of preference.

    Raises:
        MCRDLError: if a backend can't be imported, which names the one at fault, or if there is none.
    """
    found: dict[str, Any] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            raise MCRDLError(f'the backend "{entry.name}" ({entry.value}) can\'t be imported: {error}') from error
    if not found:
        raise MCRDLError("no backend is installed: deepspeed_mcrdl's entry points are missing; install it with pip")
    return dict(sorted(found.items(), key=lambda item: item[1].preference))
