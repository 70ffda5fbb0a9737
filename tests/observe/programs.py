"""What the tests of observe/ run on every rank."""

import time

import torch

import deepspeed_mcrdl as mcrdl
from deepspeed_mcrdl.config import parse
from tests.programs import face


def observed(folder, routing=None, **observe):
    """Go on with an "observe" block, everything on mpi unless `routing` says else; return the backend object."""
    block = {"observe": {"folder": str(folder), **observe}, "routing": routing or {"default": "mpi"}, "banner": False}
    face().restart(parse(block))
    return face()


def unobserved():
    """Go on without; the files are closed."""
    face().restart(parse({"banner": False}))


def calls(folder, observe):
    """Make known calls in four steps and return the rows of the log."""
    cdb = observed(folder, **observe)
    n = cdb.get_world_size()
    group = cdb.new_group([0, 1])
    for _ in range(4):
        cdb.all_reduce(torch.ones(256))
        cdb.all_reduce(torch.ones(200))
        cdb.all_gather_into_tensor(torch.empty(64 * n), torch.ones(64))
        work = cdb.all_reduce(torch.ones(100_000), async_op=True)
        time.sleep(0.002)
        work.wait()
        if cdb.get_rank() < 2:
            cdb.broadcast(torch.ones(16), 0, group=group)
        mcrdl.log_step(samples=8)
    rows = mcrdl.log_summary()
    unobserved()
    return rows


def traced(folder):
    """Make one blocking and one asynchronous call, from rank 1 ten milliseconds late."""
    cdb = observed(folder, trace=True, stragglers=True)
    cdb.barrier()
    for _ in range(5):
        if cdb.get_rank() == 1:
            time.sleep(0.01)
        cdb.all_reduce(torch.ones(256))
    work = cdb.all_reduce(torch.ones(1000), async_op=True)
    time.sleep(0.005)
    work.wait()
    rows = mcrdl.log_stragglers()
    unobserved()
    return rows


def profiled(folder):
    """Return the names of the plugin's ranges in torch's profiler."""
    cdb = observed(folder, profiler=True)
    cdb.all_reduce(torch.ones(4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cdb.all_reduce(torch.ones(256))
    unobserved()
    return [event.name for event in profile.events() if event.name.startswith("mcrdl")]


def trained(folder):
    """Train a small model with DeepSpeed's engine for seven steps of two micro-batches."""
    import deepspeed

    n = face().get_world_size()
    model = torch.nn.Linear(8, 8)
    config = {
        "train_batch_size": 8 * n,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "csv_monitor": {"enabled": True, "output_path": f"{folder}/csv", "job_name": "job"},
        "comm_backend": "mcrdl",
        "mcrdl": {"observe": {"folder": folder, "log": True, "monitor": True, "every_steps": 2}, "banner": False},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(14):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    unobserved()
    return type(engine)._take_model_step.__name__


def everything(folder):
    """Make calls on two backends with all that there is to see turned on."""
    observe = {"log": True, "trace": True, "flight": True, "stragglers": True, "every_steps": 5}
    cdb = observed(folder, {"default": "mpi", "broadcast": "gloo"}, **observe)
    n = cdb.get_world_size()
    for step in range(21):
        cdb.all_reduce(torch.ones(1000))
        cdb.broadcast(torch.ones(10_000), 0)
        work = cdb.all_to_all_single(torch.empty(64 * n), torch.ones(64 * n), async_op=True)
        time.sleep(0.001 * (step % 3))
        work.wait()
        mcrdl.log_step(samples=4)
    unobserved()
