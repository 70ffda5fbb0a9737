"""Trains a DLRM (arXiv 1906.00091) with DeepSpeed: embedding tables model-parallel, MLPs data-parallel.

Each rank owns whole tables and looks their rows up for the samples of all ranks; an all-to-all hands every rank the
vectors of its own samples. Run it with the plain launcher, with one of the dlrm configs in configs/:

    deepspeed --num_gpus 2 deepspeed_mcrdl/bench/workloads/dlrm.py --deepspeed_config configs/dlrm_auto.json

The loss on samples that were not trained on goes from ln 2 = 0.69, that of knowing nothing, to 0.60 in 100 steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_mcrdl.bench.workloads.clicks import Clicks
from deepspeed_mcrdl.bench.workloads.recorder import Recorder

TABLES_LR = 0.02  # the config's rate is that of the MLPs
HELD_OUT_BATCHES = 16


@dataclass(frozen=True)
class Preset:
    """Sizes of the model and of its samples; the config has the batch."""

    tables: int
    rows: int  # of a table
    dim: int  # of an embedding vector, and of what the bottom MLP puts out
    hots: int  # rows of each table that a sample names
    dense: int  # dense features
    bottom: tuple[int, ...]  # widths of the hidden layers
    top: tuple[int, ...]


PRESETS = {
    # Most of a step is arithmetic: of the lookups and of the tables' optimizer.
    "small": Preset(tables=26, rows=10_000, dim=64, hots=100, dense=13, bottom=(512, 256), top=(512, 256)),
    # Few lookups for many messages: half of a step over gloo is communication, as on large clusters.
    "comm": Preset(tables=8, rows=10_000, dim=64, hots=2, dense=13, bottom=(512, 256), top=(512, 256)),
}


class ExchangeVectors(torch.autograd.Function):
    """All-to-all forward; backward the reverse all-to-all, which takes gradients to the owners of the tables.

    Each rank's loss is the mean over its own samples. DeepSpeed averages the MLPs' gradients over the ranks; the
    tables' are the sums of what comes back, so they are divided by the ranks here. Both are then those of the mean
    over the global batch.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        return all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        return all_to_all(gradient.contiguous(), received, sent) / len(sent), None, None


def all_to_all(x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Send x [sum(sent)], sent[r] elements to rank r; returns [sum(received)], received[r] elements from rank r."""
    output = x.new_empty(sum(received))
    if len({*sent, *received}) == 1:  # one of the two lists has every rank's share, so all ranks decide alike
        dist.all_to_all_single(output, x)
    else:
        dist.all_to_all_single(output, x, output_split_sizes=list(received), input_split_sizes=list(sent))
    return output


class EmbeddingTables(nn.Module):
    """This rank's tables: all that are `rank` modulo the number of ranks.

    It is no part of the module that DeepSpeed's engine has, which would average its gradients over the ranks.
    """

    def __init__(self, preset: Preset, seed: int):
        super().__init__()
        self.ranks: int = dist.get_world_size()
        if self.ranks > preset.tables:
            raise SystemExit(f"{self.ranks} ranks can't share {preset.tables} tables: each needs one")
        self.counts = [len(range(owner, preset.tables, self.ranks)) for owner in range(self.ranks)]
        self.owned = list(range(dist.get_rank(), preset.tables, self.ranks))
        self.bags = nn.ModuleList(self.bag(preset, seed + table) for table in self.owned)

    @staticmethod
    def bag(preset: Preset, seed: int) -> nn.EmbeddingBag:
        """Return a table; drawn from a seed of its own, so that it doesn't depend on the number of ranks."""
        bound = preset.rows**-0.5
        weight = torch.empty(preset.rows, preset.dim)
        weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        return nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)

    def forward(self, sparse: torch.Tensor) -> torch.Tensor:
        """Return the vectors [batch, tables, dim] of this rank's samples.

        Args:
            sparse: rows [owned tables, batch of all ranks, hots].
        """
        # [batch of all ranks, owned tables, dim]: the samples of one rank lie together.
        pooled = torch.stack([bag(rows) for bag, rows in zip(self.bags, sparse, strict=True)], dim=1)
        batch, dim = len(pooled) // self.ranks, pooled.shape[-1]
        sent = [batch * len(self.owned) * dim] * self.ranks
        received = [batch * count * dim for count in self.counts]
        vectors = ExchangeVectors.apply(pooled.flatten(), sent, received)  # type: ignore[no-untyped-call]
        of_owner = [part.view(batch, -1, dim) for part in vectors.split(received)]
        tables = range(sum(self.counts))
        return torch.stack([of_owner[table % self.ranks][:, table // self.ranks] for table in tables], dim=1)


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """The data-parallel part: bottom MLP, dot products of all pairs of vectors, top MLP; returns the mean loss."""

    pairs: torch.Tensor  # [2, pairs]: which two vectors

    def __init__(self, preset: Preset):
        super().__init__()
        vectors = preset.tables + 1
        self.bottom = mlp(preset.dense, *preset.bottom, preset.dim)
        self.top = mlp(preset.dim + vectors * (vectors - 1) // 2, *preset.top, 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)

    def forward(self, dense: torch.Tensor, embedded: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean binary cross entropy.

        Args:
            dense: dense features [batch, dense].
            embedded: a vector of each table [batch, tables, dim].
            labels: [batch].
        """
        x = self.bottom(dense)
        vectors = torch.cat((x.unsqueeze(1), embedded), dim=1)
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat((x, products), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)


def share(
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tables: EmbeddingTables, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what this rank needs of a batch of all ranks: its samples, and all samples' rows of its tables."""
    dense, sparse, labels = batch
    size = len(labels) // tables.ranks
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return dense[own].to(device), sparse[tables.owned].to(device), labels[own].to(device)


@torch.no_grad()
def held_out_loss(engine: Any, tables: EmbeddingTables, batches: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Return the mean loss over `batches` (what `share` returns) of all ranks."""
    engine.eval()
    loss = torch.stack([engine(dense, tables(sparse), labels) for dense, sparse, labels in batches]).mean()
    engine.train()
    dist.all_reduce(loss)  # each rank has its own samples
    return loss.item() / tables.ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="comm")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alpha", type=float, default=1.05, help="skew of the rows; 0: all are alike")
    parser.add_argument("--report", metavar="FILE", help="write what the run cost, as JSON")
    parser.add_argument("--local_rank", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()

    preset = PRESETS[args.preset]
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = DLRM(preset)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    # Seeds apart, else samples, tables and MLPs would be made of the same random numbers.
    tables = EmbeddingTables(preset, seed=args.seed + 1000).to(engine.device)
    # Adagrad makes sparse tensors; torch warns of its own default, not to check them, unless it is asked for.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    tables_optimizer = torch.optim.Adagrad(tables.parameters(), lr=TABLES_LR)
    sizes = {"tables": preset.tables, "rows": preset.rows, "hots": preset.hots, "dense": preset.dense}
    clicks = Clicks(**sizes, alpha=args.alpha, seed=args.seed + 2000)
    drawn = (clicks.batch(engine.train_batch_size()) for _ in range(HELD_OUT_BATCHES + args.steps))
    batches = [share(batch, tables, engine.device) for batch in drawn]  # ahead of the steps, which are timed
    held_out, batches = batches[:HELD_OUT_BATCHES], batches[HELD_OUT_BATCHES:]
    before = held_out_loss(engine, tables, held_out)
    recorder = Recorder(tokens_per_step=engine.train_batch_size())  # DLRM's unit is the sample
    for step, (dense, sparse, labels) in enumerate(batches, start=1):
        with recorder.step():
            loss = engine(dense, tables(sparse), labels)
            engine.backward(loss)
            engine.step()
            tables_optimizer.step()
            tables_optimizer.zero_grad()
        recorder.loss(loss)
        if dist.get_rank() == 0 and step % max(1, args.steps // 5) == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    after = held_out_loss(engine, tables, held_out)
    if dist.get_rank() == 0:
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {args.steps} steps", flush=True)
    if args.report:
        recorder.write(args.report, held_out=(before, after))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
