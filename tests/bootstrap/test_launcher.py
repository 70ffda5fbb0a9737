"""Which MPI launcher, if any, a process believes, and which world the ranks then choose."""

from __future__ import annotations

import os
from typing import Any

import pytest

from deepspeed_mcrdl.bootstrap import mpi
from deepspeed_mcrdl.bootstrap.launcher import environment, find_launcher


def offers(launchers: list[tuple[str, int, int | None] | None], **changes: Any) -> list[dict[str, Any]]:
    common = {"trouble": None, "library": "MPICH 5", "open_mpi": False, "world_rank": None, **changes}
    return [{**common, "launcher": launcher} for launcher in launchers]


@pytest.mark.parametrize(
    ("launchers", "source"),
    [
        ([None, None], "mcrdl"),
        ([("mpirun", 1, 2), ("mpirun", 0, 2)], "mpirun"),
        ([("srun", 0, None), ("srun", 1, None)], "srun"),
        ([("srun", 0, 2), ("srun", 0, 2)], "mcrdl"),  # torchrun under srun
        ([("mpirun", 0, 1), ("mpirun", 0, 1)], "mcrdl"),
        ([("mpirun", 0, 2), None], "mcrdl"),
    ],
)
def test_where_the_world_comes_from(launchers: list[tuple[str, int, int | None] | None], source: str) -> None:
    assert mpi._choose_source(offers(launchers), 2) == source


def test_open_mpi_needs_its_launcher() -> None:
    with pytest.raises(mpi.BootstrapError, match="mpirun"):
        mpi._choose_source(offers([None, None], open_mpi=True, library="Open MPI 5.0.8"), 2)
    assert mpi._choose_source(offers([("mpirun", 0, 2), ("mpirun", 1, 2)], open_mpi=True), 2) == "mpirun"


def test_different_libraries_are_refused() -> None:
    mixed = offers([None, None])
    mixed[1]["library"] = "Intel MPI 2021.18"
    with pytest.raises(mpi.BootstrapError, match="rank 0 has MPICH 5 and rank 1 has Intel MPI"):
        mpi._choose_source(mixed, 2)


def test_a_launcher_is_believed_while_its_connection_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_FD", str(reading))  # a file by now
    assert find_launcher(open_mpi=False) is None
    os.close(reading)
    os.close(writing)
    assert find_launcher(open_mpi=False) is None
    monkeypatch.setenv("PMI_PORT", "host:1")
    assert find_launcher(open_mpi=False) == ("mpirun", 0, 2)


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "outer")
    monkeypatch.setenv("PMI_RANK", "7")
    before = dict(os.environ)
    with environment({"PMI_RANK": "0", "PMI_FD": "3"}, hide_launcher=True):
        assert os.environ["PMI_RANK"] == "0"
        assert "PMIX_NAMESPACE" not in os.environ
    assert dict(os.environ) == before
