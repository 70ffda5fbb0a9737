"""What a call sends over the network: counted at the host's interfaces, and the least that it must be."""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed_mcrdl.groups import Mesh
from deepspeed_mcrdl.operations import Operation

RATE = "MCRDL_EMULATED_RATE"  # bits per second that a host can send, where `mcrdl hosts` has set a limit
_COUNTERS = Path("/proc/self/net/dev")
_LOOPBACK = "lo"
_SENT_BYTES = 8  # its column


def sent_bytes() -> int:
    """Return the bytes that this host has sent to others since it was started, headers included."""
    rows = (line.partition(":") for line in _COUNTERS.read_text().splitlines() if ":" in line)
    return sum(int(figures.split()[_SENT_BYTES]) for name, _, figures in rows if name.strip() != _LOOPBACK)


def least_bytes(operation: Operation, mesh: Mesh, size: int) -> float:
    """Return the bytes that a host must send, or receive, whatever carries the call.

    A host counts as one rank: what its ranks can do among themselves costs nothing. Only in an all-to-all each of its
    ranks has data of its own for the others.

    Args:
        operation: an operation of a whole group.
        mesh: how the group lies on the hosts, as many ranks on each.
        size: S of the operation's formulas, in bytes.
    """
    own = mesh.ranks_per_node if operation.family == "all_to_all" else 1
    return operation.busbw_factor(mesh.nodes) * size * own


def emulated_rate() -> float | None:
    """Return the bits per second that each emulated host can send, None without a limit."""
    rate = os.environ.get(RATE)
    return float(rate) if rate else None
