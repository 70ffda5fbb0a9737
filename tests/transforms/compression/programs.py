"""What tests of compressed calls run on every rank."""

from contextlib import contextmanager

import torch
from deepspeed.utils import groups

from deepspeed_mcrdl.config import parse
from deepspeed_mcrdl.errors import MCRDLError
from tests.programs import face

SMALLEST = 4096  # bytes


def compressed(codec, more=None, **block):
    """Go on with all float32 sums compressed by `codec`, and `more` keys, and return the backend object."""
    settings = {"codec": codec, "groups": ["world"], "min_bytes": SMALLEST, "mode": "on", **block}
    face().restart(parse({"banner": False, "compression": settings, **(more or {})}))
    return face()


class Seen:
    """Observes calls: (operation, what carries it)."""

    def __init__(self):
        self.calls = []

    def timed(self, call, args, carry):
        self.calls.append((call.operation.name, call.backend))
        return carry()


def plain():
    """Go on without compression."""
    face().restart(parse({"banner": False}))


@contextmanager
def data_parallel(group):
    """Let DeepSpeed's data-parallel group be this one."""
    before, groups._DATA_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP, group
    try:
        yield
    finally:
        groups._DATA_PARALLEL_GROUP = before


def refused(block):
    """Return the error of a restart with this block."""
    try:
        face().restart(parse({"banner": False, **block}))
    except MCRDLError as error:
        return str(error)
    finally:
        plain()
    return None


def gradients(numel, size, dtype=torch.float32):
    """Return every rank's tensor, the same on all ranks; magnitudes differ from part to part."""
    scales = 2.0 ** (torch.arange(numel) // 700 % 9 - 4)
    return [
        (torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * scales).to(dtype) for rank in range(size)
    ]


def in_rank_order(tensors, op):
    """Return the sum as compressed calls make it: in float32, rank by rank, rounded once."""
    total = torch.zeros(tensors[0].numel())
    for tensor in tensors:
        total += tensor
    return (total / len(tensors) if op == "avg" else total).to(tensors[0].dtype)
