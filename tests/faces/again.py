"""Starts and ends communication again and again, then calls after the end."""

import os

import deepspeed
import deepspeed.comm as dist
import torch

for _ in range(4):
    deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [8.0] * 3
    del group  # it would keep the store of this round open
    dist.destroy_process_group()
    # With the same port, a rank that is ahead would meet the store that rank 0 is about to close; so it is with torch.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
print("AGAIN and again\n", end="", flush=True)
dist.all_reduce(tensor)
