"""Makes the user's mistake that MISTAKE names."""
# ruff: noqa: E402 - one of the mistakes is to import mpi4py first

import json
import os

mistake = os.environ["MISTAKE"]
rank = int(os.environ["RANK"])
if mistake == "mpi4py imported first":
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == 1
import deepspeed
import torch
from torch import nn

CONFIG = {"train_batch_size": 2, "comm_backend": "mcrdl", "mcrdl": json.loads(os.environ.get("BLOCK", "{}"))}
if mistake == "different configs" and rank == 1:
    CONFIG["mcrdl"] = {"routing": {"all_reduce": "gloo"}}
if mistake == "misspelt selection":
    CONFIG["comm_backend"] = "mcrld"
if mistake == "call before init":
    deepspeed.comm.all_reduce(torch.ones(2))
model = nn.Linear(4, 4)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
print("trained")
