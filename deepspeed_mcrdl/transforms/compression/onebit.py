"""One bit an element: its sign, with a scale for each block."""

from __future__ import annotations

import torch

from deepspeed_mcrdl.transforms.compression import blocks
from deepspeed_mcrdl.transforms.compression.levels import BINARY, Levels


class OneBit(Levels):
    """C(x) = (||x||_1 / d) sign(x) for each block of d elements, with sign(0) = 1.

    EF-SIGNSGD: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv
    1901.09847, algorithm 1. Of all scales the mean magnitude loses least: ||x - C(x)||^2 = ||x||^2 - ||x||_1^2 / d,
    which is at most (1 - 1/d) ||x||^2. 1-bit Adam (arXiv 2102.02888) compresses momentum in this way, with feedback
    too.
    """

    name = "onebit"
    wants_feedback = True
    levels = BINARY
    bits = 1

    def quantise(self, flat: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        return blocks.per_block(flat, lambda rows: rows.abs().mean(1)), (flat >= 0).view(torch.uint8)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.abs()
        means, most = (blocks.per_block(size, reduce) for reduce in (lambda rows: rows.mean(1), blocks.largest))
        return (size - blocks.spread(means, size.numel())).abs() + blocks.ROUNDING * blocks.spread(most, size.numel())
