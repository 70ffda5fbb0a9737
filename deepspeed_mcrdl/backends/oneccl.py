"""oneCCL through its C API (Intel's, like NCCL's), on CPU tensors; optional, and never chosen but by a rule or a table.

Its calls return when they are done. So each group has a thread that makes the group's calls in their order: the caller
goes on, and groups don't wait for each other. A call costs the way to that thread and back, some 50 us, and a thread
that is in a call whose peer has died stays in it: closing leaves it behind.

It carries what the library does rightly on CPUs. In the version we pin onecclSend and onecclRecv crash without a GPU:
there are no messages, gathers or scatters, and blocks of different sizes are filled up to the longest.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from deepspeed_mcrdl.backends.base import (
    ARITHMETIC_OPS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVABLE,
    Backend,
    Job,
    apart,
    divide,
    joined,
    spread,
)
from deepspeed_mcrdl.bootstrap.launcher import environment
from deepspeed_mcrdl.errors import MCRDLError
from deepspeed_mcrdl.groups import Group
from deepspeed_mcrdl.operations import counts
from deepspeed_mcrdl.stores import Patient
from deepspeed_mcrdl.work import DONE, Pending, Then

_PACKAGE = "oneccl"
_LIBRARIES = Path(sys.prefix) / "lib"  # where wheels put them
# In the order in which each needs the ones before it; the wheels' own search paths don't lead to them.
_LOADED = ("libintlc.so.5", "libimf.so", "libsvml.so", "libirng.so", "libsycl.so.9")
_API = "libccl.so.2"
_PLUGINS = ("libccl.so.1", "libccl_legacy_cpu.so")
_FABRICS = ("mpich/libfabric.so.1", "libfabric.so.1")  # MPICH's and Intel MPI's wheels bring one along
_ID_BYTES = 4096
_OFFLOAD = "CCL_WORKER_OFFLOAD"
_CLOSE_S = 1.0
_STORE_POLL_S = 0.002
_FAILED = b"failed:"
_LOOK_S = 200e-6

_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_BYTE = _TYPES[torch.uint8]
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "avg": 0}  # an average is divided by the group's size afterwards


class _UniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * _ID_BYTES)]


@functools.cache
def _library() -> ctypes.CDLL:
    for name in _LOADED:
        ctypes.CDLL(str(_LIBRARIES / name))
    library = ctypes.CDLL(str(_LIBRARIES / _API))
    for name in _PLUGINS:
        ctypes.CDLL(str(_LIBRARIES / name))
    library.onecclGetErrorString.restype = ctypes.c_char_p
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments in {
        "CommInitRank": (address, size, _UniqueId, number),
        "CommDestroy": (address,),
        "AllReduce": (address, address, size, number, number, address, address),
        "Reduce": (address, address, size, number, number, number, address, address),
        "Broadcast": (address, address, size, number, number, address, address),
        "AllGather": (address, address, size, number, address, address),
        "ReduceScatter": (address, address, size, number, number, address, address),
        "AllToAll": (address, address, size, number, address, address),
        "Send": (address, size, number, number, address, address),
        "Recv": (address, size, number, number, address, address),
    }.items():
        getattr(library, f"oneccl{name}").argtypes = arguments
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call the library; it blocks, and other threads run meanwhile."""
    library = _library()
    status = getattr(library, f"oneccl{name}")(*arguments)
    if status:
        raise MCRDLError(f"oneccl{name} failed with error {status}: {library.onecclGetErrorString(status).decode()}")


def _settings(one_host: bool) -> dict[str, str]:
    """Return the variables that it runs well with and that the user has not set. It reads them when it starts.

    Args:
        one_host: whether all ranks are on one host.
    """
    fabric = next((path for name in _FABRICS if (path := _LIBRARIES / name).exists()), None)
    wanted = {
        "CCL_ROOT": sys.prefix,
        "CCL_LOG_LEVEL": "error",  # else it lists all of these
        "CCL_ATL_TRANSPORT": "ofi",  # its other way is MPI, which would need a launcher
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_ATL_SHM": "1",
        # Without a thread that makes all progress, threads that wait for two groups corrupt the library's state.
        _OFFLOAD: "1",
        # Its threads and the ranks share the cores: whoever waits gives its core away.
        "CCL_YIELD": "sched_yield",
        "CCL_SPIN_COUNT": "1",
    }
    if fabric is not None:
        wanted["CCL_OFI_LIBRARY_PATH"] = str(fabric)
        if fabric.parent == _LIBRARIES:
            wanted["FI_PROVIDER_PATH"] = str(_LIBRARIES)
    if one_host:
        wanted["CCL_KVS_IFACE"] = "lo"
    return {name: value for name, value in wanted.items() if name not in os.environ}


class OneCCLPending(Pending):
    """A call that its group's thread makes.

    Args:
        call: makes it.
        buffers: whatever must stay alive until it is done.
    """

    yields_s = _LOOK_S

    def __init__(self, call: Callable[[], None], buffers: Any) -> None:
        self._call = call
        self._buffers = buffers
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the call, in the group's thread."""
        try:
            self._call()
        except Exception as error:
            self._error = error
        self._ended.set()

    def poll(self) -> bool:
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def block(self, limit_s: float) -> None:
        self._ended.wait(limit_s)


class _Communicator:
    """A communicator, and the thread that makes its calls in their order."""

    def __init__(self, handle: ctypes.c_void_p, name: str) -> None:
        self._handle = handle
        self._calls: queue.SimpleQueue[OneCCLPending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"mcrdl-oneccl-{name}", daemon=True)
        self._thread.start()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library on this communicator, in its thread."""
        _call(name, *arguments, self._handle, None)

    def destroy(self) -> None:
        """Destroy it, in its thread; it can't be used any more."""
        _call("CommDestroy", self._handle)

    def start(self, call: Callable[[], None], keep: Any = None) -> OneCCLPending:
        """Have `call` made after those before it; `keep` stays alive until it is done."""
        pending = OneCCLPending(call, keep)
        self._calls.put(pending)
        return pending

    def end(self, destroy: Callable[[], None]) -> None:
        """Have `destroy` called after its calls, which ends its thread."""
        self.start(destroy)
        self._calls.put(None)

    def wait(self, limit_s: float) -> None:
        """Return when its thread has ended, or after `limit_s` seconds: a call whose peer has died doesn't end."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (pending := self._calls.get()) is not None:
            pending.run()


class OneCCLBackend(Backend):
    """oneCCL on CPU tensors."""

    name = "oneccl"
    preference = 40
    devices = frozenset({"cpu"})
    dtypes = MOVABLE
    reductions = {  # noqa: RUF012 - declared as ClassVar in Backend
        **dict.fromkeys(FLOATS, ARITHMETIC_OPS | {"avg"}),
        **dict.fromkeys(INTEGERS - {torch.int16}, ARITHMETIC_OPS),
        **dict.fromkeys(COMPLEX, frozenset({"sum", "avg"})),
        torch.bool: ARITHMETIC_OPS,
    }

    @classmethod
    def unusable(cls) -> str | None:
        try:
            version_of(_PACKAGE)
        except PackageNotFoundError:
            return "oneCCL is not installed; `pip install --no-deps oneccl==2022.1.2` and `pip install intel-sycl-rt`"
        if not any((_LIBRARIES / name).exists() for name in _FABRICS) and "CCL_OFI_LIBRARY_PATH" not in os.environ:
            return "oneCCL finds no libfabric; `pip install mpich` brings one along, or name it in CCL_OFI_LIBRARY_PATH"
        if os.environ.get(_OFFLOAD, "1") == "0":
            return f"oneCCL would mix up the calls of two groups with {_OFFLOAD}=0; unset it"
        try:
            _library()
        except OSError as error:
            return f"oneCCL can't be loaded ({error}); `pip install intel-sycl-rt` brings what it needs"
        return None

    @classmethod
    def version(cls) -> str:
        return f"oneCCL {version_of(_PACKAGE)}"

    def __init__(self, job: Job) -> None:
        self._store = Patient(job.quick_store)
        self._settings = _settings(one_host=len(set(job.hosts)) == 1)
        self._communicators: dict[Group, _Communicator] = {}

    def join(self, group: Group) -> None:
        handle = ctypes.c_void_p()
        settings = {} if self._communicators else self._settings  # read once, when the world joins
        with environment(settings, hide_launcher=False):
            _call("CommInitRank", ctypes.byref(handle), group.size, self._unique_id(group), group.rank)
        self._communicators[group] = _Communicator(handle, group.name)

    def _unique_id(self, group: Group) -> _UniqueId:
        """Return the id that the group's first rank has drawn, or raise its error on every rank."""
        key = f"oneccl/{group.number}"
        unique_id = _UniqueId()
        if group.rank == 0:
            try:
                _call("GetUniqueId", ctypes.byref(unique_id))
            except Exception as error:
                self._store.set(key, (_FAILED + str(error).encode()).hex())
                raise
            self._store.set(key, bytes(unique_id).rstrip(b"\0").hex())
            return unique_id
        drawn = bytes.fromhex(self._store.get(key).decode())
        if drawn.startswith(_FAILED):
            raise MCRDLError(drawn.removeprefix(_FAILED).decode())
        ctypes.memmove(ctypes.byref(unique_id), drawn, len(drawn))
        return unique_id

    def leave(self, group: Group) -> None:
        self._end([group])

    def close(self) -> None:
        self._end(tuple(self._communicators))

    def _end(self, groups: Sequence[Group]) -> None:
        communicators = {group: self._communicators.pop(group) for group in groups if group in self._communicators}
        for group, communicator in communicators.items():
            communicator.end(partial(self._destroy, group, communicator))
        deadline = time.monotonic() + _CLOSE_S
        for communicator in communicators.values():
            communicator.wait(max(0.0, deadline - time.monotonic()))

    def _destroy(self, group: Group, communicator: _Communicator) -> None:
        """Destroy a communicator if all its ranks do, its first rank last; else leave it behind.

        The first rank serves the others what they ask for at their end, and without it the library aborts the process.
        """
        key = f"oneccl/{group.number}"
        self._store.add(f"{key}/leaving", 1)
        if not self._counted(f"{key}/leaving", group.size):
            return
        if group.rank == 0 and not self._counted(f"{key}/gone", group.size - 1):
            return
        communicator.destroy()
        self._store.add(f"{key}/gone", 1)

    def _counted(self, key: str, count: int) -> bool:
        deadline = time.monotonic() + _CLOSE_S
        while self._store.add(key, 0) < count:
            if time.monotonic() > deadline:
                return False
            time.sleep(_STORE_POLL_S)
        return True

    def _start(self, group: Group, name: str, *arguments: Any, keep: Any) -> OneCCLPending:
        """Have a function of the library called; `keep` must stay alive until it is done."""
        communicator = self._communicators[group]
        return communicator.start(partial(communicator.call, name, *arguments), keep)

    def all_reduce(self, group: Group, tensor: torch.Tensor, op: str) -> Pending:
        if not tensor.numel():
            return DONE
        data = tensor.data_ptr()
        pending = self._start(group, "AllReduce", data, data, *_reduced(tensor, op), keep=tensor)
        return _averaged(pending, tensor, op, group.size)

    def reduce(self, group: Group, tensor: torch.Tensor, dst: int, op: str) -> Pending:
        if not tensor.numel():
            return DONE
        root = group.index(dst)
        result = tensor if group.rank == root else torch.empty_like(tensor)
        arguments = (tensor.data_ptr(), result.data_ptr(), *_reduced(tensor, op), root)
        pending = self._start(group, "Reduce", *arguments, keep=(tensor, result))
        return _averaged(pending, tensor, op, group.size) if group.rank == root else pending

    def broadcast(self, group: Group, tensor: torch.Tensor, src: int) -> Pending:
        if not tensor.numel():
            return DONE
        data = tensor.data_ptr()
        return self._start(group, "Broadcast", data, data, tensor.nbytes, _BYTE, group.index(src), keep=tensor)

    def all_gather_into_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if not input.numel():
            return DONE
        if input.data_ptr() != output.data_ptr() + group.rank * input.nbytes:
            input = apart(input, (output,))
        arguments = (input.data_ptr(), output.data_ptr(), input.nbytes, _BYTE)
        return self._start(group, "AllGather", *arguments, keep=(output, input))

    def all_gather(self, group: Group, outputs: Sequence[torch.Tensor], input: torch.Tensor) -> Pending:
        # It gathers equal blocks only: all are filled up to the longest, which every rank knows.
        rows = input.new_empty(group.size, max(t.numel() for t in outputs))
        own = rows[group.rank]
        with torch.no_grad():
            own[: input.numel()] = input.view(-1)
        return Then(self.all_gather_into_tensor(group, rows, own), partial(_copy_starts, rows, outputs))

    def reduce_scatter_tensor(self, group: Group, output: torch.Tensor, input: torch.Tensor, op: str) -> Pending:
        if not output.numel():
            return DONE
        input = apart(input, (output,))
        arguments = (input.data_ptr(), output.data_ptr(), *_reduced(output, op))
        pending = self._start(group, "ReduceScatter", *arguments, keep=(output, input))
        return _averaged(pending, output, op, group.size)

    def reduce_scatter(self, group: Group, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> Pending:
        # It scatters equal blocks only, and these may differ: all is reduced, and each rank takes its own.
        flat = joined(inputs)
        own = torch.split(flat, [t.numel() for t in inputs])[group.rank]
        return Then(self.all_reduce(group, flat, op), lambda: spread(own, [output]))

    def all_to_all_single(
        self,
        group: Group,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> Pending:
        input = apart(input, (output,))
        if output_splits is not None or input_splits is not None:
            sent, received = (
                torch.split(tensor.view(-1), counts(tensor, rows, group.size))
                for tensor, rows in ((input, input_splits), (output, output_splits))
            )
            return self._uneven(group, received, sent)
        if not input.numel():
            return DONE
        arguments = (input.data_ptr(), output.data_ptr(), input.nbytes // group.size, _BYTE)
        return self._start(group, "AllToAll", *arguments, keep=(output, input))

    def all_to_all(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        return self._uneven(group, outputs, inputs)

    def _uneven(self, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Pending:
        """Exchange blocks of any sizes as blocks of the longest that any rank sends, which the ranks find out first."""
        communicator = self._communicators[group]
        received: list[torch.Tensor] = []

        def call() -> None:
            longest = torch.tensor([max(t.numel() for t in inputs)])
            communicator.call("AllReduce", longest.data_ptr(), longest.data_ptr(), *_reduced(longest, "max"))
            width = int(longest)
            rows = _in_rows(inputs, width)
            target = torch.empty_like(rows)
            if width:
                block = width * rows.element_size()
                communicator.call("AllToAll", rows.data_ptr(), target.data_ptr(), block, _BYTE)
            received.append(target)

        return Then(communicator.start(call), lambda: _copy_starts(received[0], outputs))

    def barrier(self, group: Group) -> Pending:
        # The C API has none: a sum that nobody reads ends when all have come.
        return self.all_reduce(group, torch.zeros(1, dtype=torch.int32), "sum")


def _reduced(tensor: torch.Tensor, op: str) -> tuple[int, int, int]:
    """Return count, type and operation as the library takes them."""
    if tensor.is_complex():
        return tensor.numel() * 2, _TYPES[tensor.dtype.to_real()], _OPS[op]
    if tensor.dtype is torch.bool:
        # The sum of truth values is their "or"; a sum of bytes would be 2.
        return tensor.numel(), _BYTE, _OPS["max" if op == "sum" else op]
    return tensor.numel(), _TYPES[tensor.dtype], _OPS[op]


def _averaged(pending: Pending, tensor: torch.Tensor, op: str, size: int) -> Pending:
    return Then(pending, partial(divide, tensor, size)) if op == "avg" else pending


def _in_rows(tensors: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    rows = tensors[0].new_empty(len(tensors), width)
    with torch.no_grad():
        for row, tensor in zip(rows, tensors, strict=True):
            row[: tensor.numel()] = tensor.reshape(-1)
    return rows


def _copy_starts(rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for row, output in zip(rows, outputs, strict=True):
            output.copy_(row[: output.numel()].view_as(output))
