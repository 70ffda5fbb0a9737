"""Messages of more than 2^31 bytes, where 32-bit counts end, by the operations that only move bytes."""

import pytest
import torch

from tests.backends import BACKENDS
from tests.programs import use

BYTES = 2**31 + 4096
pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]


def _filled(rank):
    tensor = torch.zeros(BYTES, dtype=torch.uint8)
    tensor[:8] = tensor[-8:] = tensor[2**31 - 4 : 2**31 + 4] = rank + 1
    return tensor


def _check(tensor, rank):
    assert tensor.numel() == BYTES
    for part in (tensor[:8], tensor[-8:], tensor[2**31 - 4 : 2**31 + 4]):
        assert (part == rank + 1).all()
    assert torch.count_nonzero(tensor) == 24


def _broadcast(cdb):
    tensor = _filled(cdb.get_rank())
    cdb.broadcast(tensor, 1)
    _check(tensor, 1)


def _all_gather(cdb):
    output = torch.empty(2, BYTES, dtype=torch.uint8)
    output[cdb.get_rank()] = _filled(cdb.get_rank())
    cdb.all_gather_into_tensor(output, output[cdb.get_rank()])
    for rank in (0, 1):
        _check(output[rank], rank)


def _all_to_all(cdb):
    # All to the other rank, nothing to oneself.
    rank = cdb.get_rank()
    rows = [BYTES, 0] if rank else [0, BYTES]
    output = torch.empty(BYTES, dtype=torch.uint8)
    cdb.all_to_all_single(output, _filled(rank), rows, rows)
    _check(output, 1 - rank)


def _message(cdb):
    if cdb.get_rank() == 0:
        cdb.send(_filled(0), 1)
    else:
        tensor = torch.empty(BYTES, dtype=torch.uint8)
        cdb.recv(tensor, 0)
        _check(tensor, 0)


OPERATIONS = {"broadcast": _broadcast, "all_gather": _all_gather, "all_to_all": _all_to_all, "message": _message}


def _run(backend, name):
    OPERATIONS[name](use({"default": backend}))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_two_gibibytes(ranks, backend, name):
    ranks(2).run(_run, backend, name, timeout_s=500)
