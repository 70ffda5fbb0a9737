"""The MPI library that mpi4py uses, for what can't go through mpi4py: whatever comes before MPI_Init and ends it.

mpi4py would initialise MPI when imported, and holds the GIL in Init and Finalize. Loading initialises nothing.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import importlib.util
import queue
import re
import threading
from collections.abc import Callable
from typing import TypeVar

from deepspeed_mcrdl.bootstrap.pmi import BootstrapError

_T = TypeVar("_T")
_THREAD_MULTIPLE = 3  # in the mpi.h of MPICH, Intel MPI and Open MPI
_VERSIONS = (
    ("Open MPI", re.compile(r"Open MPI v([\w.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library ([\w.]+)")),
    ("MVAPICH", re.compile(r"MVAPICH\d* Version\s*:\s*([\w.]+)")),
    ("MPICH", re.compile(r"MPICH Version\s*:\s*([\w.]+)", re.IGNORECASE)),
)


@functools.cache
def load() -> Library:
    """Return the library, or raise BootstrapError if there is none."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is None or spec.origin is None:
            raise OSError("mpi4py has no module for the MPI that MPI4PY_MPIABI names")
        # The extension itself is opened: the MPI functions are found through what it is linked with.
        return Library(spec.origin)
    except ModuleNotFoundError as error:
        raise BootstrapError("mpi4py is not installed; `pip install mpi4py mpich` brings MPI along") from error
    except (RuntimeError, OSError, AttributeError) as error:
        reason = "; ".join(str(error).split("\n")[:2])
        raise BootstrapError(
            f"no MPI library could be loaded ({reason}); `pip install mpich`, or name it in MPI4PY_LIBMPI"
        ) from error


class Library:
    """A loaded MPI library.

    Args:
        path: a shared object that is linked with it.
    """

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        text = ctypes.create_string_buffer(8192)
        self._lib.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
        self.is_open_mpi = hasattr(self._lib, "ompi_mpi_comm_self")
        self.name = _name(text.value.decode(errors="replace"))

    @property
    def initialized(self) -> bool:
        return self._flag("MPI_Initialized")

    @property
    def finalized(self) -> bool:
        return self._flag("MPI_Finalized")

    def initialize(self) -> None:
        """Call MPI_Init_thread."""
        provided = ctypes.c_int()
        status = self._lib.MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(provided))
        if status:
            raise BootstrapError(f"MPI_Init_thread of {self.name} failed with error {status}")
        if provided.value < _THREAD_MULTIPLE:
            raise BootstrapError(f"{self.name} was built without MPI_THREAD_MULTIPLE; use one that has it")

    def finalize(self) -> None:
        """Call MPI_Finalize."""
        self._lib.MPI_Finalize()

    def _flag(self, function: str) -> bool:
        flag = ctypes.c_int()
        getattr(self._lib, function)(ctypes.byref(flag))
        return bool(flag.value)


@functools.cache
def mpi_thread() -> MPIThread:
    """Return this process's MPIThread, started at first use."""
    return MPIThread()


class MPIThread:
    """Runs the calls that hang when a peer has died; a single thread, as MPI wants its first and last call in one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mcrdl-mpi", daemon=True).start()

    def call(self, function: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        """Have `function` called after the calls before it."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()


def _name(version: str) -> str:
    """Return vendor and version from the text that the library shows of itself."""
    for vendor, pattern in _VERSIONS:
        if match := pattern.search(version):
            return f"{vendor} {match[1]}"
    return version.partition("\n")[0]
