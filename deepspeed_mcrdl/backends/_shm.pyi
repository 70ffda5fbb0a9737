"""Shared memory between the ranks of one host; native/ has the sources, in C.

Addresses and sizes are in bytes, ranks are places in the group. `kept` is kept alive until the operation is done. A
start returns None if the operation is done already.
"""

from collections.abc import Sequence
from typing import Any, final

def where() -> int:
    """Return the address of bytes that `can_read` looks for."""

def can_read(pid: int, address: int) -> bool:
    """Return whether this process can read the memory of another one."""

def copy_through(source: int, own: int, other: int, target: int, size: int, chunk: int) -> None:
    """Copy `size` bytes from source to own and as many from other to target, a chunk at a time.

    The chunks take the same place in shared memory, one after the other, as those of a call do.
    """

@final
class Operation:
    """A collective under way."""

    def poll(self) -> bool:
        """Carry it on; return whether it is done."""

    def block(self, limit_s: float) -> None:
        """Sleep until it may go on, for `limit_s` seconds at the most."""

@final
class Message:
    """A message under way."""

    def poll(self) -> bool:
        """Carry it on; return whether it is done."""

    def block(self, limit_s: float) -> None:
        """Sleep until something may go on, for `limit_s` seconds at the most."""

    def source(self) -> int:
        """Return the place of the rank that a received message came from."""

@final
class Collectives:
    """The collectives of a group in one segment; `pids` are zeros where ranks can't read each other's memory."""

    def __new__(
        cls,
        fd: int,
        rank: int,
        ranks: int,
        slots: int,
        slot_bytes: int,
        direct_bytes: int,
        spins: int,
        pids: Sequence[int],
    ) -> Collectives: ...
    @staticmethod
    def size(ranks: int, slots: int, slot_bytes: int) -> int:
        """Return the bytes of a segment."""

    def barrier(self) -> Operation | None: ...
    def broadcast(self, address: int, size: int, root: int, kept: Any) -> Operation | None: ...
    def all_gather(self, input: int, output: int, block: int, kept: Any) -> Operation | None: ...
    def gather(
        self, input: int, size: int, outputs: Sequence[int], sizes: Sequence[int], agreed: bool, kept: Any
    ) -> Operation | None:
        """Give this rank's block to all who have a place for it; `agreed`: every rank knows the largest block."""

    def all_to_all(self, input: int, output: int, block: int, kept: Any) -> Operation | None: ...
    def exchange(
        self,
        inputs: Sequence[int],
        input_sizes: Sequence[int],
        outputs: Sequence[int],
        output_sizes: Sequence[int],
        agreed: bool,
        kept: Any,
    ) -> Operation | None:
        """Move a block for each pair of ranks; `agreed`: every rank knows the largest block."""

    def reduce(
        self, address: int, size: int, type: int, op: int, item: int, root: int, split: int, kept: Any
    ) -> Operation | None:
        """Reduce in place, at `root` or, if that is -1, everywhere; from `split` bytes on each rank reduces a part."""

    def reduce_scatter(
        self, input: int, output: int, block: int, type: int, op: int, item: int, kept: Any
    ) -> Operation | None: ...
    def reduce_scatter_list(
        self, inputs: Sequence[int], sizes: Sequence[int], output: int, type: int, op: int, item: int, kept: Any
    ) -> Operation | None: ...
    def close(self) -> None:
        """Let go of the segment; what is not done ends with an error."""

@final
class Messages:
    """The messages of this host's ranks in one segment."""

    def __new__(
        cls,
        fd: int,
        rank: int,
        ranks: int,
        ring_bytes: int,
        large_bytes: int,
        spins: int,
        pids: Sequence[int],
    ) -> Messages: ...
    @staticmethod
    def size(ranks: int, ring_bytes: int) -> int:
        """Return the bytes of a segment."""

    def send(self, address: int, size: int, rank: int, tag: int, kept: Any) -> Message | None: ...
    def recv(self, address: int, size: int, rank: int, tag: int, kept: Any) -> Message | None:
        """Start a receive; rank -1: from any. None: it is done, and not from any."""

    def turn(self) -> None:
        """Carry on all messages."""

    def close(self) -> None:
        """Let go of the segment; what is not done ends with an error."""
