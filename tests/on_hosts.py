"""Programs for the ranks of `mcrdl hosts`; each is run as `python on_hosts.py NAME`."""

import os
import socket
import sys
import time

SENT_BYTES = 4_000_000


def say(*words):
    """Print a line of its own, whatever the other ranks print."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def gloo():
    """One sum, with nothing but torch."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((100_000,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    say("SUM", socket.gethostname(), dist.get_rank(), os.environ["LOCAL_RANK"], total.unique().tolist())
    dist.destroy_process_group()


def plugin():
    """A step of training, and sums and messages on each backend that spans hosts."""
    import deepspeed
    import torch
    from torch import nn

    import deepspeed_mcrdl as mcrdl

    model = nn.Linear(4, 4)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "comm_backend": "mcrdl",
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    rank, size = mcrdl.get_rank(), mcrdl.get_world_size()
    neighbours = [mcrdl.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]  # of one host
    for backend in ("mpi", "gloo", "auto"):
        total = torch.full((100_000,), rank + 1.0)
        mcrdl.all_reduce(total, backend=backend)
        other = torch.zeros(1000)
        work = mcrdl.irecv(other, (rank - 1) % size, backend=backend)
        mcrdl.send(torch.full((1000,), float(rank)), (rank + 1) % size, backend=backend)
        work.wait()
        say("GOT", socket.gethostname(), rank, backend, total.unique().tolist(), other.unique().tolist())
    here = torch.full((1000,), rank + 1.0)
    mcrdl.all_reduce(here, group=neighbours, backend="shm" if "shm" in mcrdl.get_backends() else "gloo")
    say("HERE", rank, here.unique().tolist())


def rate():
    """The first host sends SENT_BYTES to the second, which says how long they took."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("node0", 4000)) as server, server.accept()[0] as link:
            link.sendall(bytes(SENT_BYTES))
        return
    while True:
        try:
            link = socket.create_connection(("node0", 4000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with link:
        began = time.monotonic()
        received = 0
        while block := link.recv(1 << 20):
            received += len(block)
        say("TOOK", received, time.monotonic() - began)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()
