"""Jobs of their own processes that end badly: `python jobs.py WHAT FOLDER`, in the environment of a rank."""

import os
import sys
import time

import torch

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.errors import CallTimeoutError, MismatchError

LIMIT_S = 2.0


def start(folder, **more):
    """Start with everything on."""
    observe = {"log": True, "trace": True, "flight": True, "stragglers": True, "folder": folder}
    mcrdl.init(backends="gloo", config={"banner": False, "observe": observe, **more})


def late(folder):
    """Rank 1 leaves out a call; the others wait for it in time."""
    start(folder, timeout_s=LIMIT_S)
    mcrdl.barrier()
    pair = mcrdl.new_group([1, 2])
    if mcrdl.get_rank() == 1:
        mcrdl.recv(torch.ones(3), src=2, group=pair)
        time.sleep(LIMIT_S + 1)
        return
    if mcrdl.get_rank() == 2:
        mcrdl.send(torch.ones(3), dst=1, group=pair)
    try:
        mcrdl.all_reduce(torch.ones(1000))
    except CallTimeoutError:
        time.sleep(1)
        os._exit(3)


def hangs(folder):
    """Rank 0 waits for rank 1, which does not come; the test ends both."""
    start(folder)
    mcrdl.barrier()
    if mcrdl.get_rank() == 0:
        work = mcrdl.all_reduce(torch.ones(50), async_op=True)
        print("UP", flush=True)
        work.wait()
    mcrdl.broadcast(torch.ones(2), src=0)
    print("UP", flush=True)
    time.sleep(60)


def hangs_elsewhere(folder):
    """Rank 1 never comes to a call, since it is in code of its own."""
    start(folder)
    for _ in range(2000):
        mcrdl.barrier()
    print("UP", flush=True)
    if mcrdl.get_rank() == 0:
        mcrdl.all_reduce(torch.ones(50))
    time.sleep(60)


def mismatch(folder):
    """The ranks' calls don't fit together."""
    start(folder, checked=True)
    try:
        mcrdl.all_reduce(torch.ones(4 + mcrdl.get_rank()))
    except MismatchError:
        os._exit(3)


def summary(folder):
    """Ends without a word after a call, alone or not."""
    mcrdl.init(config={"banner": False, "observe": {"summary": True, "folder": folder}})
    mcrdl.all_reduce(torch.ones(1000))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
