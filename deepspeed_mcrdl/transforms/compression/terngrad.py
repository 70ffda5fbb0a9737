"""TernGrad: two bits an element, right in the mean."""

from __future__ import annotations

import torch

from deepspeed_mcrdl.transforms.compression import blocks
from deepspeed_mcrdl.transforms.compression.levels import TERNARY, Levels, ternary

DRAWS = 2**16
DRAWS_PER_WORD = 4


class TernGrad(Levels):
    """C(x) = s sign(x) b for each block, with s = max |x| and b = 1 with probability |x| / s, else 0: unbiased.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", arXiv 1705.07878,
    the function "ternarize". Probabilities are rounded to multiples of 2**-16, so the mean is right within 2**-17 s.
    Scales of blocks take the place of the paper's scales of layers, and of its clipping, which would be a bias.
    """

    name = "terngrad"
    stochastic = True
    levels = TERNARY
    bits = 2

    def quantise(self, flat: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.per_block(flat, blocks.largest).clamp_min_(blocks.SMALLEST)
        # Random numbers are what takes the time here: four from each that is drawn.
        words = torch.empty(-(-flat.numel() // DRAWS_PER_WORD), dtype=torch.int64, device=flat.device)
        words.random_(-(2**63), None, generator=generator)
        draws = words.view(torch.int16)[: flat.numel()].float().add_(DRAWS / 2 + 0.5)
        return scales, ternary(blocks.scaled(flat, DRAWS / scales), draws)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        most = blocks.per_block(values, blocks.largest).clamp_min_(blocks.SMALLEST)
        return blocks.spread(most, values.numel())
