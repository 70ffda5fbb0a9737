"""Trains small models in many DeepSpeed configurations, one after another, and writes each rank's losses exactly.

Usage: train.py --output DIR [--stock] CASE... ; with --stock no config selects the plugin.
"""

import argparse
import collections
import importlib
import json
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.comm import comm
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from torch import nn

WIDTH = 16
STEPS = 3
BLOCK = {"banner": False}


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return x + (y[0] if isinstance(y, tuple) else y)


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return deepspeed.checkpointing.checkpoint(self.inner, x)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def moe(ep_size):
    return MoE(hidden_size=WIDTH, expert=mlp(), num_experts=4, ep_size=ep_size, k=1, capacity_factor=2.0)


class TensorParallel:
    """The least that DeepSpeed asks of an `mpu`: neighbours share a model, every second rank shares data."""

    def __init__(self, size):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.size = size
        for first in range(0, world, size):
            group = dist.new_group(range(first, first + size))
            if rank // size == first // size:
                self.model_group = group
        for offset in range(size):
            group = dist.new_group(range(offset, world, size))
            if rank % size == offset:
                self.data_group = group

    def get_model_parallel_group(self):
        return self.model_group

    def get_model_parallel_world_size(self):
        return self.size

    def get_model_parallel_rank(self):
        return dist.get_rank() % self.size

    def get_data_parallel_group(self):
        return self.data_group

    def get_data_parallel_world_size(self):
        return dist.get_world_size() // self.size

    def get_data_parallel_rank(self):
        return dist.get_rank() // self.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def config(stock, zero=0, dtype="fp32", **more):
    result = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bf16"},
        **more,
    }
    return result if stock else {**result, "comm_backend": "mcrdl", "mcrdl": BLOCK}


def train(stock, model, zero=0, dtype="fp32", mpu=None, **more):
    has_moe = any(isinstance(module, MoE) for module in model.modules())
    groups = {"params": list(model.parameters()), "name": "all"}
    parameters = split_params_into_different_moe_groups_for_optimizer(groups) if has_moe else model.parameters()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config(stock, zero, dtype, **more), mpu=mpu
    )
    data_rank = mpu.get_data_parallel_rank() if mpu else dist.get_rank()
    generator = torch.Generator().manual_seed(100 + data_rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=generator).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        loss = (engine(x) - x.roll(1, dims=-1)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def train_pipeline(stock):
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    more = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stock, **more))
    generator = torch.Generator().manual_seed(7)

    def batches():
        while True:
            x = torch.randn(4, WIDTH, generator=generator)
            yield x, x.roll(1, dims=-1)

    stream = batches()
    return [engine.train_batch(stream).item() for _ in range(STEPS)]


def body(*inner):
    return nn.Sequential(*(Residual(module) for module in inner), nn.Linear(WIDTH, WIDTH))


CASES = {
    "zero0": lambda stock: train(stock, body(mlp(), mlp())),
    "zero1": lambda stock: train(stock, body(mlp(), mlp()), zero=1),
    "zero2": lambda stock: train(stock, body(mlp(), mlp()), zero=2),
    "zero3": lambda stock: train(stock, body(mlp(), mlp()), zero=3),
    "bf16": lambda stock: train(stock, body(mlp(), mlp()), zero=1, dtype="bf16"),
    "checkpointing": lambda stock: train(stock, body(mlp(), Checkpointed(mlp()), Checkpointed(moe(2))), zero=1),
    "moe_ep1": lambda stock: train(stock, body(mlp(), moe(1))),
    "moe_ep2": lambda stock: train(stock, body(mlp(), moe(2)), zero=1),
    "moe_ep2_zero2": lambda stock: train(stock, body(mlp(), moe(2)), zero=2),
    "moe_tp2": lambda stock: train(stock, body(mlp(), moe(dist.get_world_size() // 2)), zero=1, mpu=TensorParallel(2)),
    "pipeline": train_pipeline,
}


def count_calls(counts):
    for name in ("all_reduce", "broadcast", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor",
                 "send", "recv", "new_group"):  # fmt: skip
        method = getattr(comm.cdb, name)

        def counted(*args, _name=name, _method=method, **kwargs):
            counts[_name] += 1
            return _method(*args, **kwargs)

        setattr(comm.cdb, name, counted)


def carried():
    """Return "operation on kind of group: backend" for every route taken, and forget them."""
    routes = comm.cdb.runtime._routes
    names = {f"{key[0]} on {route.group.kind}: {route.backend}" for key, route in routes.items()}
    routes.clear()
    return sorted(names)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--routing", type=json.loads, default={}, help="the plugin's routing rules")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("cases", nargs="+", choices=CASES)
    args = parser.parse_args()
    if args.stock:
        # The kernel serves inference alone; compiling it would need a compiler and a minute.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        deepspeed.init_distributed(verbose=False)
    else:
        deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    BLOCK["routing"] = args.routing
    counts: collections.Counter[str] = collections.Counter()
    count_calls(counts)
    results = {}
    for case in args.cases:
        counts.clear()
        torch.manual_seed(0)
        losses = CASES[case](args.stock)
        backend = f"{type(comm.cdb).__module__}.{type(comm.cdb).__name__}"
        results[case] = {"losses": [loss.hex() for loss in losses], "calls": dict(counts), "backend": backend}
        if not args.stock:
            results[case]["carried"] = carried()
    (args.output / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
