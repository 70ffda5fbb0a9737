"""Eight bits an element: linear quantisation with a scale for each block."""

from __future__ import annotations

import torch

from deepspeed_mcrdl.transforms.compression import blocks

LARGEST_CODE = 127


class Int8(blocks.Blocked):
    """For each block s = max |x| / 127 and q = round(x / s), decoded as s q: |error| <= s / 2, besides rounding.

    Absolute maximum quantisation by blocks: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
    2110.02861, section 2.1, with the linear data type.
    """

    name = "int8"
    bits = 8

    def write(
        self, flat: torch.Tensor, generator: torch.Generator | None, scales: torch.Tensor, codes: torch.Tensor
    ) -> None:
        scales.copy_(blocks.per_block(flat, blocks.largest).div_(LARGEST_CODE).clamp_min_(blocks.SMALLEST))
        codes.view(torch.int8).copy_(blocks.scaled(flat, scales.reciprocal()).round_())

    def read(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.view(torch.int8))  # exact in every float dtype
        blocks.scaled(out, scales, out)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        scales = blocks.per_block(values, blocks.largest).div_(LARGEST_CODE).clamp_min_(blocks.SMALLEST)
        return blocks.spread(scales, values.numel()) * (0.5 + blocks.ROUNDING * LARGEST_CODE)
