"""What codecs have in common whose blocks of consecutive elements share a scale.

A message may hold gradients of several layers, whose magnitudes differ by orders; so a scale for each block, where the
papers have one for each tensor. The last block is shorter where the number of elements is no multiple.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from deepspeed_mcrdl.transforms.compression.codec import Codec, Layout, new_payload, parts

BLOCK = 512

# On a CPU tensors are coded by pieces of this many elements (512 KB of float32). Their intermediate results are small
# enough for the allocator to keep; those of a large tensor are fresh memory in each call, up to four times as slow.
PIECE = 256 * BLOCK

# The smallest scale of codecs that divide by theirs: 2**16 divided by it is still finite in float32.
SMALLEST = 2.0**-110

# What rounding in float32 adds to the errors that codecs have, for an element of magnitude 1.
ROUNDING = 1e-6


class Blocked(Codec):
    """A codec whose payload is a float32 scale for each block, then a code for each element.

    Class attributes:
        bits: the size of a code: 1, 2, 4 or 8.
    """

    bits: ClassVar[int]

    @abstractmethod
    def write(
        self, flat: torch.Tensor, generator: torch.Generator | None, scales: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Encode a float32 tensor to its float32 scales and the uint8 bytes of its codes."""

    @abstractmethod
    def read(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Decode to `out`."""

    def _layout(self, numel: int) -> Layout:
        return (torch.float32, -(-numel // BLOCK)), (torch.uint8, -(-numel * self.bits // 8))

    def _encode(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        payload, _ = new_payload(self._layout(tensor.numel()), tensor.device)
        for flat, scales, codes in self._pieces(tensor, payload):
            self.write(flat.float(), generator, scales, codes)
        return payload

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        for piece, scales, codes in self._pieces(out, payload):
            self.read(scales, codes, piece)

    def _merge(self, accumulator: torch.Tensor, payload: torch.Tensor) -> None:
        for piece, scales, codes in self._pieces(accumulator, payload):
            decoded = torch.empty_like(piece)
            self.read(scales, codes, decoded)
            piece.add_(decoded)

    def _pieces(
        self, tensor: torch.Tensor, payload: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return views of each piece of the tensor, of its scales, and of its codes."""
        size = PIECE if tensor.is_cpu else -(-tensor.numel() // BLOCK) * BLOCK
        scales, codes = parts(payload, self._layout(tensor.numel()))
        return zip(
            torch.split(tensor, size),
            torch.split(scales, size // BLOCK),
            torch.split(codes, size * self.bits // 8),
            strict=True,
        )


def per_block(flat: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a number for each block; `reduce` makes a vector of them from a matrix with a block in each row."""
    whole = flat.numel() // BLOCK * BLOCK
    found = [reduce(flat[:whole].view(-1, BLOCK))]
    if whole < flat.numel():
        found.append(reduce(flat[whole:].view(1, -1)))
    return torch.cat(found)


def largest(rows: torch.Tensor) -> torch.Tensor:
    """Return max |x| of each row; NaN of a row that has one."""
    return rows.abs().amax(1)


def scaled(flat: torch.Tensor, factors: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return each block times its factor, in `out` if it is given, which may be `flat` itself."""
    if out is None:
        out = torch.empty_like(flat)
    whole = flat.numel() // BLOCK * BLOCK
    rows = (-1, BLOCK)
    torch.mul(flat[:whole].view(rows), factors[: whole // BLOCK, None], out=out[:whole].view(rows))
    if whole < flat.numel():
        torch.mul(flat[whole:], factors[-1:], out=out[whole:])
    return out


def spread(numbers: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the number of its block for each of `numel` elements."""
    return numbers.repeat_interleave(BLOCK)[:numel]
