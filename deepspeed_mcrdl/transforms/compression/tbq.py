"""TBQ, threshold binary quantisation: two bits an element, for what is beyond a threshold."""

from __future__ import annotations

import torch

from deepspeed_mcrdl.errors import ConfigError
from deepspeed_mcrdl.transforms.compression import blocks
from deepspeed_mcrdl.transforms.compression.levels import TERNARY, Levels, ternary


class TBQ(Levels):
    """C(x) = t for x >= t, -t for x <= -t, else 0: the error is less than t, or |x| - t beyond it.

    Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015. The paper sends
    an index of 32 bits for each element beyond t; the two bits for all elements, as in HiPress, have a size that does
    not depend on the values. Its t is a constant set by hand; here it is a multiple of the root mean square of each
    block, since gradients differ between layers and shrink in training.

    Args:
        threshold: t / root mean square. Of a normal distribution 0.87 loses least of the square sum (34 %), of
            Laplace's 1.41. 1 or more can lose blocks of equal magnitudes in every step.

    Raises:
        ConfigError: if the threshold isn't above 0.
    """

    name = "tbq"
    wants_feedback = True
    levels = TERNARY
    bits = 2

    def __init__(self, threshold: float = 0.9) -> None:
        if not threshold > 0:
            raise ConfigError(f"the threshold of tbq is {threshold}; it must be above 0, and best below 1")
        self.threshold = threshold

    def quantise(self, flat: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        def limit(rows: torch.Tensor) -> torch.Tensor:
            norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
            return norms.mul_(self.threshold / rows.shape[1] ** 0.5)

        limits = blocks.per_block(flat, limit)
        return limits, ternary(blocks.scaled(flat, limits.reciprocal()), 1.0)

    def _bound(self, values: torch.Tensor) -> torch.Tensor:
        limits = blocks.per_block(values, lambda rows: rows.square().mean(1).sqrt()).mul_(self.threshold)
        limit, size = blocks.spread(limits, values.numel()), values.abs()
        # Squares of numbers below 2**-63 are lost in float32.
        return torch.maximum(limit, size - limit) + blocks.ROUNDING * size + 2.0**-73
