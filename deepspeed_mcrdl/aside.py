"""A call's own work on a device: on a stream beside the caller's and in order with it, blocking nobody."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from deepspeed_mcrdl.streams import Device, device_of
from deepspeed_mcrdl.work import Pending, Then, as_made, lost

T = TypeVar("T")


class Aside:
    """A stream beside the caller's, for the work of one call: it begins after what the caller has issued so far.

    Args:
        device: the device.
        stream: the stream; None: one of the call's own, so that no call waits behind another that can't run yet.
        reads: whether the host reads what the device computes in the call. Each part of the call then starts when what
            is before it has happened, rather than been put in order, so that no reading blocks.
    """

    def __init__(self, device: Device, stream: Any = None, reads: bool = False) -> None:
        self.device = device
        self._stream = device.side_stream() if stream is None else stream
        self._reads = reads
        self._inference = torch.is_inference_mode_enabled()
        self._ended: Pending | None = None  # the last that was polled to its end
        self._ordered: list[Pending] = []  # what work was put in order after, and has yet to be polled to its end
        before = device.record()
        with self.on():
            device.wait(before)
            self._begun = device.record() if reads else None

    def on(self) -> AbstractContextManager[Any]:
        """Make the stream the current one within a "with" statement."""
        return self.device.on(self._stream)

    def ready(self, after: Pending | None) -> bool:
        """Return whether `run` may be called. Must not block.

        Args:
            after: what is before it, which gets a chance to progress; None: what the caller had issued.
        """
        if after is None:
            return not self._reads or self.device.done(self._begun)
        if after.stream_ordered and not self._reads:
            return after.orderable()
        if not after.poll():
            return False
        self._ended = after
        return True

    def run(self, function: Callable[[], T], after: Pending | None) -> T:
        """Return what `function` returns, whose work goes to the stream after `after`."""
        with self.on(), as_made(self._inference):
            if after is not None and after is not self._ended:
                after.order()
                self._ordered.append(after)
            return function()

    def ended(self) -> bool:
        """Return whether all that work was put in order after has ended too, or raise its error."""
        while self._ordered:
            if not self._ordered[0].poll():
                return False
            del self._ordered[0]
        return True

    def then(self, first: Pending, step: Callable[[], object], holds: Any = None) -> Pending:
        """Return `first` followed by `step`, whose work is the device's; for `holds` see Streamed."""
        call = Streamed(first, self, step, holds)
        call.begin()
        return call


class Streamed(Pending):
    """A call that ends with work on a device.

    It is done when that has happened, and can be put in order with a stream as soon as that has been issued. Somebody
    has to poll it to its end: what the work uses lives as long as this.

    Args:
        first: what is before that work.
        aside: where the work goes; all earlier uses of the call's tensors come before.
        step: issues it.
        holds: whatever must live until it has happened.
    """

    host_driven = True
    stream_ordered = True

    def __init__(self, first: Pending, aside: Aside, step: Callable[[], object], holds: Any) -> None:
        self._first = first
        self._aside = aside
        self._step: Callable[[], object] | None = step
        self._holds = holds
        self._back: Any = None
        self._error: Exception | None = None
        self.yields_s = first.yields_s

    def begin(self) -> None:
        """Issue the work if that can be done by now; an error is that of whoever polls."""
        try:
            if self._aside.ready(self._first):
                self._back = self._aside.run(self._issue, self._first)
            else:
                self.yields_s = self._first.yields_s
        except Exception as error:
            self._error = error
            lost.append(self)

    def poll(self) -> bool:
        if not (self.orderable() and self._aside.device.done(self._back) and self._aside.ended()):
            return False
        self._step = self._holds = None
        return True

    def orderable(self) -> bool:
        if self._back is None and self._error is None:
            self.begin()
        if self._error is not None:
            raise self._error
        return self._back is not None

    def _issue(self) -> Any:
        assert self._step is not None, "it is issued once"
        self._step()
        return self._aside.device.record()

    def order(self) -> None:
        assert self._back is not None, "order() comes after orderable()"
        self._aside.device.wait(self._back)

    def block(self, limit_s: float) -> None:
        if self._back is None:
            self._first.block(limit_s)
        else:
            super().block(limit_s)

    def source_rank(self) -> int:
        return self._first.source_rank()


def then(first: Pending, step: Callable[[], None], tensor: torch.Tensor) -> Pending:
    """Return `first` followed by `step`, which works on `tensor`, wherever that is."""
    device = device_of(tensor)
    return Then(first, step) if device is None else Aside(device).then(first, step)
