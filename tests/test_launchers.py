"""The plugin under every launcher: each makes the same two ranks, with MPI and gloo."""

import json
import sys
from importlib.metadata import version

import pytest

from deepspeed_mcrdl.bench.launch import free_port
from tests import launcher
from tests.faces.test_waking_up import CONFIG, SCRIPT


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**CONFIG, "mcrdl": {**CONFIG["mcrdl"], "backends": ["mpi", "gloo"]}}))
    return [str(SCRIPT), "--deepspeed_config", str(path)]


def check(run, mpi):
    assert run.status == 0, run.output
    results = [json.loads(text) for text in run.lines("WOKE ")]
    assert len(results) == 2, run.output
    assert all("all_reduce:mpi" in carried and "broadcast:gloo" in carried for *_, carried in results)
    assert f"backend mpi: MPICH {mpi}" in run.output.replace(version("mpich"), "VERSION")


def test_torchrun(arguments):
    torchrun = [str(launcher.BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    check(launcher.run([*torchrun, *arguments], WAY="path"), "VERSION, started by mcrdl")


def test_mpirun(arguments):
    mpirun = [str(launcher.BIN / "mpirun"), "-n", "2", sys.executable]
    # DeepSpeed itself asks MPI for the ranks, which starts it
    check(launcher.run([*mpirun, *arguments], WAY="path", MASTER_PORT=str(free_port())), "VERSION\n")


def test_deepspeed_with_the_mpich_launcher(arguments, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    options = ["--launcher", "mpich", "--force_multi", "--no_ssh_check", "--master_addr", "127.0.0.1"]
    port = ["--master_port", str(free_port())]
    command = [str(launcher.BIN / "deepspeed"), "--hostfile", str(hostfile), *options, *port, *arguments]
    check(
        launcher.run(command, WAY="path", PATH=f"{launcher.BIN}:/usr/local/bin:/usr/bin:/bin"),
        "VERSION, started by mpirun",
    )


def test_four_ranks_on_the_plain_launcher(arguments, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**CONFIG, "train_batch_size": 4}))
    run = launcher.deepspeed(*arguments, ranks=4, WAY="path")
    assert run.status == 0, run.output
    assert len(run.lines("WOKE ")) == 4
    assert "4 ranks on 1 host" in run.output
