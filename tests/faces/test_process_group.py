"""The c10d backend "mcrdl": torch.distributed's own interface."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import launcher
from tests.backends import BACKENDS

SCRIPT = Path(__file__).parent / "torch_face.py"


def torchrun(name, ranks=2, status=0, **env):
    command = [str(launcher.BIN / "torchrun"), "--nproc-per-node", str(ranks), "--master-port"]
    run = launcher.run([*command, str(launcher.free_port()), str(SCRIPT), name], 180, **env)
    assert run.status == status, run.output
    return run


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_function_of_torch_distributed(ranks):
    run = torchrun("operations", ranks)
    assert len(run.lines("ENDED")) == ranks
    carried = run.lines("CARRIED")[0].split()
    assert "all_reduce:gloo" in carried  # as the config has it
    assert f"all_gather_into_tensor:{BACKENDS[0]}" in carried
    assert len({what.partition(":")[0] for what in carried}) == 14


def test_ddp_fsdp_functional_collectives_and_meshes():
    run = torchrun("models")
    assert len(run.lines("ENDED")) == 2
    first = BACKENDS[0]
    expected = {f"all_gather_into_tensor:{first}", f"reduce_scatter_tensor:{first}"}
    assert expected <= set(run.lines("CARRIED")[0].split())


def test_the_faces_share_one_runtime_and_no_call_goes_through_it_twice():
    assert torchrun("both_faces").lines("CALLS") == ["5", "5"]


def test_the_stock_backend_works_on_a_process_group_of_ours():
    run = torchrun("stock_backend_over_us")
    assert run.lines("CARRIED")[0].startswith("TorchBackend all_reduce:")


def test_a_mistake_is_a_sentence():
    run = torchrun("mistakes", status=1)
    assert "deepspeed_mcrdl: error: rank 0: all_to_all_single on group 'world'" in run.output


def test_without_our_name_torch_knows_no_other_backend():
    # a registered backend changes how torch reads strings such as "cpu:gloo"
    code = (
        "import torch.distributed as d; print(d.Backend._plugins); d.Backend('mcrdl'); print(list(d.Backend._plugins))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert printed.splitlines() == ["{}", "['MCRDL']"]
