"""Programs in which something goes wrong; each is run on every rank as `python programs.py NAME`."""

import os
import signal
import sys
import threading
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import comm

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.config import parse

LIMIT_S = 1.5
COMPRESSION = {"codec": "int8", "groups": ["world"], "mode": "on"}


def start(**config):
    mcrdl.init(config={"timeout_s": LIMIT_S, "banner": False, **config})
    return mcrdl.get_rank(), mcrdl.get_world_size()


def say(*words):
    """Print a line of its own, whatever the other ranks print."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def expect_late(what, call):
    began = time.monotonic()
    try:
        call()
    except TimeoutError as error:
        say("LATE", mcrdl.get_rank(), what, f"{time.monotonic() - began:.2f}", error)
    else:
        say("NOT LATE", mcrdl.get_rank(), what)


def late():
    """The last rank leaves out one call of each kind, each on a group of its own."""
    rank, n = start()
    waits = {
        "blocking": lambda g, b: mcrdl.all_reduce(torch.ones(4), group=g, backend=b),
        "asynchronous": lambda g, b: mcrdl.all_reduce(torch.ones(4), group=g, backend=b, async_op=True).wait(),
        "large": lambda g, b: mcrdl.all_reduce(torch.ones(4_000_000), group=g, backend=b),
        "barrier": lambda g, b: mcrdl.barrier(group=g, backend=b),
        "message": lambda g, b: mcrdl.recv(torch.ones(4), n - 1, group=g, backend=b),
        "silent": lambda g, b: mcrdl.reduce_scatter_tensor(torch.ones(1), torch.ones(n), group=g, backend=b),
    }
    for backend in [name for name in mcrdl.get_backends() if name != "oneccl"]:
        for what, call in waits.items():
            group = mcrdl.new_group(range(n))
            mcrdl.all_reduce(torch.ones(1), group=group, backend=backend)
            if rank != n - 1:
                expect_late(f"{backend}/{what}", lambda call=call, group=group, backend=backend: call(group, backend))
            else:
                time.sleep(LIMIT_S)
            mcrdl.monitored_barrier()
    sys.stdout.flush()
    os._exit(0)  # operations that can't end are still under way


def late_elsewhere():
    """The last rank waits in another call than the others."""
    rank, n = start()
    everybody, other = mcrdl.new_group(range(n)), mcrdl.new_group(range(n))
    group = other if rank == n - 1 else everybody
    mcrdl.all_reduce(torch.ones(4), group=group, backend="gloo" if rank == n - 1 else "mpi")


def late_uncaught():
    """The last rank stays away; nobody catches the error of the others."""
    rank, n = start()
    mcrdl.all_reduce(torch.ones(4), backend="mpi")
    if rank == n - 1:
        time.sleep(LIMIT_S + 3)
        return
    mcrdl.all_reduce(torch.ones(4), backend="mpi")


def late_compressed(mode):
    """The last rank stays away from a compressed call; with "plan" from the first one, in which the ranks measure."""
    rank, n = start(compression={**COMPRESSION, "mode": mode})
    if mode == "on":
        mcrdl.all_reduce(torch.ones(100_000), backend="mpi")
    if rank == n - 1:
        time.sleep(LIMIT_S + 3)
        return
    mcrdl.all_reduce(torch.ones(100_000), backend="mpi")


def late_to_a_group(face):
    """The last rank stays away when a group is made."""
    if face == "deepspeed":
        deepspeed.init_distributed(dist_backend="mcrdl", auto_mpi_discovery=False, verbose=False)
        comm.cdb.restart(parse({"timeout_s": LIMIT_S, "banner": False}))
        rank, n = comm.cdb.get_rank(), comm.cdb.get_world_size()
    else:
        rank, n = start()
    if rank == n - 1:
        time.sleep(LIMIT_S + 3)
    elif face == "deepspeed":
        comm.cdb.new_group(range(n))
    else:
        (mcrdl.new_group if face == "mcrdl" else dist.new_group)(range(n))


def killed(phase):
    """The last rank is killed in a phase of its life, while the others are in a call that needs it."""
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == n - 1 and phase == "start":
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    more = {"compressed": {"compression": COMPRESSION}, "chunks": {"chunk": {"max_bytes": 4096, "min_call_bytes": 0}}}
    start(**more.get(phase, {}))
    if rank == n - 1:
        if phase == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    say("UP", rank)
    tensor = torch.ones(100_000)
    while True:
        mcrdl.all_reduce(tensor.fill_(1), backend=phase if phase in mcrdl.get_backends() else "mpi")


def waiting():
    """All ranks but the last wait in MPI for it, with no limit that counts."""
    rank, n = start(timeout_s=600)
    say("UP", rank)
    if rank == n - 1:
        time.sleep(600)
    mcrdl.all_reduce(torch.ones(4), backend="mpi")


def again(path):
    """Communication is started and ended many times in one process."""
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = []
    for cycle in range(110):
        dist.init_process_group(
            "mcrdl", init_method=f"file://{path}.{cycle}", rank=rank, world_size=n, pg_options={"banner": False}
        )
        for backend in mcrdl.get_backends():
            tensor = torch.ones(4)
            mcrdl.all_reduce(tensor, backend=backend)
            assert (tensor == n).all()
        dist.barrier()
        dist.destroy_process_group()
        if cycle in (9, 109):
            seen.append(resources())
    say("SEEN", *(number for counts in seen for number in counts))


def resources():
    """Return threads, open descriptors and resident kilobytes of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    # DeepSpeed's launcher puts an option of its own before them.
    name, *arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    globals()[name](*arguments)
