"""DGC, deep gradient compression: the k largest elements."""

from __future__ import annotations

import math

import torch

from deepspeed_mcrdl.transforms.compression.codec import Layout
from deepspeed_mcrdl.transforms.compression.sparse import Sparse, pairs

# From this size on a sample pays, of one in SAMPLED elements.
LARGE = 2**16
SAMPLED = 97


class DGC(Sparse):
    """Keeps the k = ceil(ratio numel) elements of the largest magnitude: ||x - C(x)||^2 <= (1 - k / numel) ||x||^2.

    Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", arXiv
    1712.01887, sparse updates; the residual is feedback.py's. The paper's ratio of 0.001 needs its momentum
    correction, momentum factor masking and warm-up, which are the optimizer's; hence a default of 0.01.
    """

    name = "dgc"

    def _layout(self, numel: int) -> Layout:
        return pairs(self._kept(numel))

    def _kept(self, numel: int) -> int:
        return math.ceil(self.ratio * numel)

    def select(self, magnitudes: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        kept = self._kept(magnitudes.numel())
        if magnitudes.is_cpu and magnitudes.numel() >= LARGE:
            # The paper's sampling, but exact: a threshold from a sample, taken low, leaves few candidates.
            sample = magnitudes[::SAMPLED]
            likely = min(sample.numel(), 10 + 3 * kept // (2 * SAMPLED))
            limit = sample.topk(likely, sorted=False).values.amin()
            candidates = (magnitudes < limit).logical_not_().nonzero().view(-1)  # not "at least": NaN is one too
            if candidates.numel() >= kept:
                return candidates[magnitudes[candidates].topk(kept, sorted=False).indices]
        return magnitudes.topk(kept, sorted=False).indices

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.abs()
        smallest_kept = size.topk(self._kept(size.numel())).values[-1]
        return size.masked_fill(size > smallest_kept, 0.0)
