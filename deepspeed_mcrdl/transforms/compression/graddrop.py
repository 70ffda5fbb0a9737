"""GradDrop, gradient dropping: the elements above a threshold that a sample gives."""

from __future__ import annotations

import math

import torch

from deepspeed_mcrdl.transforms.compression.sparse import Sparse

SAMPLED = 1000
SMALLEST_SAMPLE = 1024


class GradDrop(Sparse):
    """Keeps the elements with |x| >= t, where t drops all but about `ratio` of them; zeros are dropped always.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv 1704.05021, algorithm 1: t is the
    quantile of a random sample of 0.1 % of the elements (at least 1024), and 99 % are dropped. The size of the
    payload depends on the values: 8 bytes for each kept element, and elements that tie at t are all kept.
    """

    name = "graddrop"
    stochastic = True

    def _layout(self, numel: int) -> None:
        return None

    def select(self, magnitudes: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        numel, sample = magnitudes.numel(), magnitudes
        size = max(numel // SAMPLED, SMALLEST_SAMPLE)
        if size < numel:
            sample = magnitudes[torch.randint(numel, (size,), generator=generator, device=magnitudes.device)]
        limit = sample.topk(math.ceil(self.ratio * sample.numel()), sorted=False).values.amin()
        # Not "at least t": NaN is kept.
        return (magnitudes < limit).logical_or_(magnitudes == 0).logical_not_().nonzero().view(-1)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs()
