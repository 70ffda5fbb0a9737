"""What codecs of one or two bits an element have in common: a level for each code, and a scale for each block."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

import torch

from deepspeed_mcrdl.transforms.compression import blocks

BINARY = (-1.0, 1.0)
TERNARY = (-1.0, 0.0, 1.0)


class Levels(blocks.Blocked):
    """A codec that decodes each element to a level times the scale of its block.

    Each byte has the codes of several elements, the first in its lowest bits.

    Class attributes:
        levels: the level of each code.
    """

    levels: ClassVar[tuple[float, ...]]

    @abstractmethod
    def quantise(self, flat: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale of each block and the uint8 code of each element of a float32 tensor."""

    def write(
        self, flat: torch.Tensor, generator: torch.Generator | None, scales: torch.Tensor, codes: torch.Tensor
    ) -> None:
        found, unpacked = self.quantise(flat, generator)
        scales.copy_(found)
        codes.copy_(pack(unpacked, self.bits))

    def read(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        values = _levels_of_bytes(self.levels, self.bits, codes.device).index_select(0, codes.int())
        blocks.scaled(values.view(-1)[: out.numel()], scales, out)


def ternary(values: torch.Tensor, limits: torch.Tensor | float) -> torch.Tensor:
    """Return the TERNARY codes: of 1 from `limits` on, of -1 up to minus `limits`, else of 0, also for NaN."""
    return (values >= limits).view(torch.uint8) - (values <= -limits).view(torch.uint8) + 1


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 1 or 2 bits that stood in a byte each, as many in a byte as fit, the first in its lowest bits.

    As many bytes are read as one integer. One product moves all their codes to its highest byte: the sum of shifted
    copies, in which no two codes meet, so that nothing is carried.
    """
    per_byte = 8 // bits
    top = 8 * per_byte - 8
    if codes.numel() % per_byte:
        codes = torch.nn.functional.pad(codes, (0, per_byte - codes.numel() % per_byte))
    words = codes.view({1: torch.int64, 2: torch.int32}[bits])
    return (words * sum(1 << top - (8 - bits) * i for i in range(per_byte))).bitwise_right_shift_(top).to(torch.uint8)


@functools.cache
def _levels_of_bytes(levels: tuple[float, ...], bits: int, device: torch.device) -> torch.Tensor:
    """Return the levels that each of the 256 bytes stands for; a code without one has NaN."""
    known = dict(enumerate(levels))
    rows = [[known.get(byte >> i & 2**bits - 1, float("nan")) for i in range(0, 8, bits)] for byte in range(256)]
    return torch.tensor(rows, dtype=torch.float32, device=device)
