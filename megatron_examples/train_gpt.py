"""Trains a byte-level GPT with Megatron-style tensor parallelism and ZeRO-1. See README.md beside this file."""

import argparse
from dataclasses import dataclass
from itertools import islice

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
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
    length: int  # bytes of a window of text


PRESETS = {
    # Most of a step is arithmetic.
    "small": Preset(layers=2, hidden=768, heads=8, length=256),
    # Few tokens for many messages: half of a step over gloo is communication, as on large clusters.
    "comm": Preset(layers=8, hidden=128, heads=4, length=32),
}


class Mesh:
    """Ranks as a grid, tensor parallel ones side by side; DeepSpeed calls such an object `mpu`."""

    def __init__(self, tensor_parallel: int):
        world, rank = dist.get_world_size(), dist.get_rank()
        if world % tensor_parallel:
            raise SystemExit(f"--tp {tensor_parallel} does not divide {world} ranks")
        self.tp = tensor_parallel
        rows = [range(first, first + self.tp) for first in range(0, world, self.tp)]
        columns = [range(offset, world, self.tp) for offset in range(self.tp)]
        # Every rank takes part in making every group, also of those that it is not in.
        self.tensor_group = [dist.new_group(row) for row in rows][rank // self.tp]
        self.data_group = [dist.new_group(column) for column in columns][rank % self.tp]

    def get_model_parallel_group(self):
        return self.tensor_group

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() % self.tp

    def get_data_parallel_group(self):
        return self.data_group

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.tp

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


class ToTensorParallel(torch.autograd.Function):
    """Identity forward; sums the gradients of the ranks backward (Megatron-LM's f, arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.mesh.tensor_group)
        return gradient, None


class FromTensorParallel(torch.autograd.Function):
    """Sums over the ranks forward; identity backward (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx, x, mesh):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=mesh.tensor_group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def mark_as_share(module: nn.Module) -> None:
    """Tell DeepSpeed that other ranks have other parts of these parameters, so that it adds up their norms."""
    for parameter in module.parameters():
        parameter.model_parallel = True


class ColumnParallelLinear(nn.Module):
    """A linear layer of which every rank has a share of the outputs."""

    def __init__(self, inputs: int, outputs: int, mesh: Mesh):
        super().__init__()
        self.linear, self.mesh = nn.Linear(inputs, outputs // mesh.tp), mesh
        mark_as_share(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(ToTensorParallel.apply(x, self.mesh))


class RowParallelLinear(nn.Module):
    """A linear layer of which every rank has a share of the inputs; the bias is added once, after the sum."""

    def __init__(self, inputs: int, outputs: int, mesh: Mesh):
        super().__init__()
        self.linear, self.mesh = nn.Linear(inputs // mesh.tp, outputs, bias=False), mesh
        mark_as_share(self.linear)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FromTensorParallel.apply(self.linear(x), self.mesh) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which every rank has a share of the vocabulary."""

    def __init__(self, hidden: int, mesh: Mesh):
        super().__init__()
        self.share = VOCABULARY // mesh.tp
        self.first, self.mesh = self.share * mesh.get_model_parallel_rank(), mesh
        self.embedding = nn.Embedding(self.share, hidden)
        mark_as_share(self.embedding)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - self.first
        mine = (own >= 0) & (own < self.share)
        x = self.embedding(own.clamp(0, self.share - 1)) * mine.unsqueeze(-1)
        return FromTensorParallel.apply(x, self.mesh)


def vocabulary_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Mean cross entropy of logits [tokens, vocabulary / tp] of which every rank has a share of the vocabulary."""
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.tensor_group)
    logits = logits - largest.unsqueeze(-1)
    own = targets - logits.shape[-1] * mesh.get_model_parallel_rank()
    mine = (own >= 0) & (own < logits.shape[-1])
    target = logits.gather(-1, own.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine
    both = FromTensorParallel.apply(torch.stack((logits.exp().sum(dim=-1), target)), mesh)
    return (both[0].log() - both[1]).mean()


class Block(nn.Module):
    def __init__(self, preset: Preset, mesh: Mesh):
        super().__init__()
        self.heads = preset.heads // mesh.tp
        self.norm1, self.norm2 = nn.LayerNorm(preset.hidden), nn.LayerNorm(preset.hidden)
        self.qkv = ColumnParallelLinear(preset.hidden, 3 * preset.hidden, mesh)
        self.out = RowParallelLinear(preset.hidden, preset.hidden, mesh)
        self.up = ColumnParallelLinear(preset.hidden, 4 * preset.hidden, mesh)
        self.down = RowParallelLinear(4 * preset.hidden, preset.hidden, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, length, hidden]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean cross entropy of the next byte."""

    def __init__(self, preset: Preset, mesh: Mesh, seed: int):
        super().__init__()
        self.mesh = mesh
        self.embedding = VocabularyParallelEmbedding(preset.hidden, mesh)
        # The one random parameter that all tensor-parallel ranks have whole, so it is drawn alike on all, from a
        # stream apart from those of the ranks' shares: with one of theirs it would repeat the embedding's numbers.
        alike = torch.Generator().manual_seed(seed + 500)
        self.position = nn.Parameter(torch.randn(preset.length, preset.hidden, generator=alike))
        self.blocks = nn.Sequential(*(Block(preset, mesh) for _ in range(preset.layers)))
        self.norm = nn.LayerNorm(preset.hidden)
        self.head = ColumnParallelLinear(preset.hidden, VOCABULARY, mesh)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # both [batch, length]
        x = self.blocks(self.embedding(tokens) + self.position)
        return vocabulary_parallel_cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), self.mesh)


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
    parser.add_argument("--tp", type=int, default=2, help="ranks that share one model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text files (default: Python's standard library)")
    parser.add_argument("--report", metavar="FILE", help="write what the run cost, as JSON")
    parser.add_argument("--local_rank", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()

    preset = PRESETS[args.preset]
    deepspeed.init_distributed()
    mesh = Mesh(args.tp)
    torch.manual_seed(args.seed + 1000 * mesh.get_model_parallel_rank())  # every rank draws its own share
    model = GPT(preset, mesh, args.seed)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        mpu=mesh,
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
