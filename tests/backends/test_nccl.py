"""CUDA tensors take NCCL, CPU tensors of the same job MPI."""

import sys

import pytest
import torch

from deepspeed_mcrdl.bench.launch import free_port, rank_environment
from tests import launcher

PROGRAM = """
import deepspeed, torch
from deepspeed.comm import comm
deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
for device in ("cuda", "cpu"):
    tensor = torch.arange(1024., device=device)
    deepspeed.comm.all_reduce(tensor)
    work = deepspeed.comm.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor.cpu(), torch.arange(1024.))
print("CARRIED", *sorted({f"{key[0]}:{route.backend}" for key, route in comm.cdb.runtime._routes.items()}))
deepspeed.comm.destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_carried_by_the_backend_of_their_device(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**rank_environment(0, 1, free_port()), "DS_ACCELERATOR": "cuda"}
    run = launcher.run([sys.executable, str(script)], **env)
    assert run.status == 0, run.output
    assert run.lines("CARRIED ") == ["all_reduce:mpi all_reduce:nccl"], run.output
