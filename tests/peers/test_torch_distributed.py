"""torch's own tests of torch.distributed (they come in its wheel), run on the backend "mcrdl" as they are on gloo.

The tests choose by the backend's name what to run, so they are defined as for gloo; the processes that run them then
start "mcrdl". MCRDL_PEERS_BACKEND=gloo runs them on gloo itself, to compare.
"""

import multiprocessing
import os
import tempfile

import pytest

pytest.importorskip("expecttest")
pytestmark = [pytest.mark.peers, pytest.mark.timeout(120)]

os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=tempfile.mkdtemp(), OMP_NUM_THREADS="1")

import torch.distributed as dist  # noqa: E402 - the environment comes first
from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

BACKEND = os.environ.get("MCRDL_PEERS_BACKEND", "mcrdl")

_BY_NAME = "torch refuses monitored_barrier by the backend's name; deepspeed_mcrdl.monitored_barrier does it"
# Tests that pass on gloo and not on "mcrdl", with the reason.
NOT_ON_US = {
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_get_backend": "it expects the name gloo, where the backend's name is mcrdl",
}


class TestOnMCRDL(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """Each test in three processes of its own."""

    def setUp(self):
        if BACKEND == "mcrdl" and self._testMethodName in NOT_ON_US:
            self.skipTest(NOT_ON_US[self._testMethodName])
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        for name in ("init_process_group", "new_group"):
            setattr(dist, name, _on(BACKEND, getattr(dist, name)))
        super()._run(rank, test_name, file_name, pipe, **kwargs)


def _on(backend, function):
    """Return `function`, which makes a process group, with "gloo" replaced by the backend under test."""

    def call(*args, **kwargs):
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = backend
        if function.__name__ == "init_process_group" and backend == "mcrdl":
            kwargs["pg_options"] = {"banner": False}
        return function(*args, **kwargs)

    return call
