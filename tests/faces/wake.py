"""Starts DeepSpeed in the way that WAY names, trains a step, and prints which backend carries it."""
# ruff: noqa: E402 - the order of imports is what is tested

import argparse
import json
import os

way = os.environ["WAY"]
if way == "explicit import":
    import deepspeed_mcrdl

    assert deepspeed_mcrdl.__version__
elif way == "torch imported first":
    import torch
import deepspeed
import torch
from deepspeed.comm import comm
from torch import nn

CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "comm_backend": "mcrdl",
    "mcrdl": {"routing": {"broadcast": "gloo"}},
}


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    given = {}
    args = options()
    if way in ("dict", "dict after init", "dict, torch initialised first", "dict, dist_backend"):
        given["config"] = CONFIG
        args.deepspeed_config = None
    elif way == "config_params":
        given["config_params"] = CONFIG
    else:
        given["args"] = args
    if way in ("init first", "dict after init"):
        deepspeed.init_distributed()
    if way in ("dist_backend", "dict, dist_backend"):
        deepspeed.init_distributed(dist_backend="mcrdl")
    if way in ("torch initialised first", "dict, torch initialised first"):
        torch.distributed.init_process_group("gloo")
    if way == "zero.Init":
        zero = {**CONFIG, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=zero):
            model = nn.Linear(4, 4)
        given = {"config": zero}
    else:
        model = nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **given)
    loss = engine(torch.ones(1, 4)).sum()
    engine.backward(loss)
    engine.step()
    runtime = getattr(comm.cdb, "runtime", None)
    carried = runtime and sorted({f"{key[0]}:{_name(route)}" for key, route in runtime._routes.items()})
    print(
        "WOKE " + json.dumps([type(comm.cdb).__name__, comm.cdb.shm_comm_op is None, carried]) + "\n",
        end="",
        flush=True,
    )


def _name(route):
    return route.backend


if __name__ == "__main__":
    main()
