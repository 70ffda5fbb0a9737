"""Trains the GPT example with data parallelism once for each codec, and writes the held-out losses on rank 0.

Usage: compressed_gpt.py --output FILE CODEC... ; the first run is without compression.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.comm import comm

from deepspeed_mcrdl.bench.workloads.text import ByteText
from megatron_examples.train_gpt import GPT, Mesh, Preset, held_out_loss

PRESET = Preset(layers=2, hidden=64, heads=2, length=32)
OPTIONS = {"dgc": {"ratio": 0.1}, "graddrop": {"ratio": 0.1}}
SEED = 1
RATE = 2e-3
WARMUP = {"onebit": 0.5, "tbq": 0.25, "terngrad": 0.5, "dgc": 0.25, "graddrop": 0.25}  # parts of all steps


def config(codec, steps, warmup):
    compression = {"codec": codec, "options": OPTIONS.get(codec, {})}
    compression |= {"mode": "on", "min_bytes": 4096, "warmup_steps": warmup}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": RATE, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": 20, "warmup_max_lr": RATE},
        },
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "comm_backend": "mcrdl",
        "mcrdl": {"banner": False, "compression": compression if codec else {}},
    }


def train(codec, steps, warmup):
    """Return the held-out losses before and after, and by what gradients were carried."""
    mesh = Mesh(1)
    torch.manual_seed(SEED)
    model = GPT(PRESET, mesh, SEED)
    data = ByteText(PRESET.length)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        mpu=mesh,
        training_data=data,
        config=config(codec, steps, warmup),
    )
    held_out = ByteText(PRESET.length, held_out=True)
    losses = [held_out_loss(engine, held_out)]
    for tokens, targets in islice(loader, steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    losses.append(held_out_loss(engine, held_out))
    routes = comm.cdb.runtime._routes.values()
    engine.destroy()
    return {"losses": losses, "by": sorted({route.backend for route in routes})}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, help="uncompressed steps of every codec (default: WARMUP)")
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("codecs", nargs="+")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="mcrdl", verbose=False)
    results = {}
    for codec in (None, *args.codecs):
        warmup = int(WARMUP.get(codec, 0) * args.steps) if args.warmup is None else args.warmup
        results[str(codec)] = train(codec, args.steps, warmup)
    if dist.get_rank() == 0:
        args.output.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
