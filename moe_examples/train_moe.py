"""Trains a byte-level language model with DeepSpeed's mixture-of-experts layers. See README.md beside this file."""

import argparse
from dataclasses import dataclass
from itertools import islice

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.utils.data import DataLoader

from deepspeed_mcrdl.bench.workloads.recorder import Recorder
from deepspeed_mcrdl.bench.workloads.text import VOCABULARY, ByteText


@dataclass(frozen=True)
class Preset:
    """Sizes of the model and of its text; the config has the batch."""

    layers: int
    hidden: int
    heads: int
    experts: int
    length: int  # bytes of a window of text


PRESETS = {
    # Most of a step is arithmetic.
    "small": Preset(layers=2, hidden=512, heads=8, experts=4, length=256),
    # Few tokens for many messages: half of a step over gloo is communication, as on large clusters.
    "comm": Preset(layers=4, hidden=128, heads=2, experts=2, length=16),
}


class Attention(nn.Module):
    def __init__(self, preset: Preset):
        super().__init__()
        self.heads = preset.heads
        self.qkv = nn.Linear(preset.hidden, 3 * preset.hidden)
        self.out = nn.Linear(preset.hidden, preset.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, hidden]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, preset: Preset, ep_size: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(preset.hidden), nn.LayerNorm(preset.hidden)
        self.attention = Attention(preset)
        expert = nn.Sequential(
            nn.Linear(preset.hidden, 2 * preset.hidden), nn.GELU(), nn.Linear(2 * preset.hidden, preset.hidden)
        )
        self.moe = MoE(preset.hidden, expert, num_experts=preset.experts, ep_size=ep_size, k=1, capacity_factor=1.25)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance_loss, _ = self.moe(self.norm2(x))
        return x + y, balance_loss


class MoELanguageModel(nn.Module):
    """Returns the mean cross entropy of the next byte plus a hundredth of the experts' balance loss."""

    def __init__(self, preset: Preset, ep_size: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, preset.hidden)
        self.position = nn.Embedding(preset.length, preset.hidden)
        self.blocks = nn.ModuleList(Block(preset, ep_size) for _ in range(preset.layers))
        self.norm = nn.LayerNorm(preset.hidden)
        self.head = nn.Linear(preset.hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # both [batch, length]
        x = self.embedding(tokens) + self.position.weight
        balance = x.new_zeros(())
        for block in self.blocks:
            x, balance_loss = block(x)
            balance = balance + balance_loss
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss + 0.01 * balance if self.training else loss


@torch.no_grad()
def held_out_loss(engine: deepspeed.DeepSpeedEngine, data: ByteText) -> float:
    engine.eval()
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=range(0, len(data), 100))
    losses = [engine(*(t.to(engine.device) for t in pair)) for pair in islice(loader, 16)]
    engine.train()
    return torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="comm")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ep-size", type=int, default=2, help="ranks that share one set of experts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text files (default: Python's standard library)")
    parser.add_argument("--report", metavar="FILE", help="write what the run cost, as JSON")
    parser.add_argument("--local_rank", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()

    preset = PRESETS[args.preset]
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = MoELanguageModel(preset, args.ep_size)
    groups = {"params": list(model.parameters()), "name": "all"}
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(groups),
        training_data=ByteText(preset.length, args.data),
    )
    held_out = ByteText(preset.length, args.data, held_out=True)
    batches = islice(deepspeed.runtime.dataloader.RepeatingLoader(loader), args.steps)
    batches = [[t.to(engine.device) for t in pair] for pair in batches]  # ahead of the steps, which are timed
    before = held_out_loss(engine, held_out)
    recorder = Recorder(tokens_per_step=engine.train_batch_size() * preset.length)
    for step, (tokens, targets) in enumerate(batches, start=1):
        with recorder.step():
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        recorder.loss(loss)
        if dist.get_rank() == 0 and step % max(1, args.steps // 5) == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    after = held_out_loss(engine, held_out)
    if dist.get_rank() == 0:
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {args.steps} steps", flush=True)
    if args.report:
        recorder.write(args.report, held_out=(before, after))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
