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


FUTURES = """
import torch, torch.distributed as dist, deepspeed_mcrdl
dist.init_process_group("mcrdl")
tensor = torch.zeros(1 << 20, device="cuda")
for number in range(1, 4):
    torch.cuda._sleep(100_000_000)
    tensor.add_(1)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        seen = future.wait()[0].clone()
    other.synchronize()
    assert (seen == number).all(), (number, seen)
print("SEEN")
dist.destroy_process_group()
"""


def run(tmp_path, program):
    script = tmp_path / "program.py"
    script.write_text(program)
    env = {**rank_environment(0, 1, free_port()), "DS_ACCELERATOR": "cuda"}
    done = launcher.run([sys.executable, str(script)], **env)
    assert done.status == 0, done.output
    return done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_carried_by_the_backend_of_their_device(tmp_path):
    done = run(tmp_path, PROGRAM)
    assert done.lines("CARRIED ") == ["all_reduce:mpi all_reduce:nccl"], done.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_whoever_waits_for_a_future_on_any_stream_comes_after_the_call(tmp_path):
    run(tmp_path, FUTURES)
