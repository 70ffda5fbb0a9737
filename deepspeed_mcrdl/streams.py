"""Streams: the few verbs through which all ordering of GPU work goes.

Whoever orders work on a device does it by these verbs alone, so that the order can be tested on a simulated device.
Importing this touches no GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

DEVICE_TYPES = frozenset({"cpu", "cuda"})  # of tensors whose work can be put in order, or is done at once


class Device(ABC):
    """What executes kernels in streams. The current stream is that of the calling thread."""

    @abstractmethod
    def record(self) -> Any:
        """Return an event that happens after the work issued so far on the current stream."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Make later work on the current stream wait for `event`; the host goes on."""

    @abstractmethod
    def done(self, event: Any) -> bool:
        """Return whether `event` has happened. If so, the host and whatever it issues from now on come after it."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Block the host until `event` has happened."""

    @abstractmethod
    def side_stream(self) -> Any:
        """Return a stream to copy on beside the caller's."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the current one within a "with" statement."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy on the current stream; the host goes on. Both tensors must live until it has happened."""

    @abstractmethod
    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor in host memory, of the shape and dtype of `like`, that `copy` can copy to and
        from without blocking."""


class CudaDevice(Device):
    """A GPU by torch.cuda.

    Args:
        index: its number in this process.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def record(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        return event

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._index).wait_event(event)

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def side_stream(self) -> Any:
        # torch hands out the streams of a pool in turn. Programs take theirs from the pool of normal priority.
        return torch.cuda.Stream(self._index, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # torch goes back to the device before, which in a thread that has set none makes a context on GPU 0.
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            yield

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            destination.copy_(source, non_blocking=True)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


@cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(index)


def device_of(tensor: torch.Tensor) -> Device | None:
    """Return the device that `tensor` lives on, None for host memory."""
    return _cuda(tensor.get_device()) if tensor.is_cuda else None
