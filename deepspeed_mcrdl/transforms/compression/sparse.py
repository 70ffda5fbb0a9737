"""What codecs that keep only the largest elements have in common: a payload of indices and values."""

from __future__ import annotations

from abc import abstractmethod

import torch

from deepspeed_mcrdl.errors import CallError, ConfigError
from deepspeed_mcrdl.transforms.compression.codec import Codec, Layout, layout_bytes, new_payload, parts

LARGEST_INDEX = 2**31 - 1


class Sparse(Codec):
    """A codec that keeps some elements, exactly, and decodes the others to 0.

    Its payload is the int32 indices of the kept, then their values as float32.

    Args:
        ratio: the part of the elements to keep.

    Raises:
        ConfigError: if the ratio isn't above 0 and at most 1.
    """

    wants_feedback = True

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ConfigError(f"the ratio of {self.name} is {ratio}; it must be above 0 and at most 1")
        self.ratio = ratio

    @abstractmethod
    def select(self, magnitudes: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Return the indices of the elements to keep; NaN counts as the largest."""

    def _encode(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if tensor.numel() > LARGEST_INDEX:
            raise CallError(
                f'the codec "{self.name}" takes at most {LARGEST_INDEX} elements; encode smaller partitions'
            )
        flat = tensor.float()
        kept = self.select(flat.abs(), generator)
        payload, (indices, values) = new_payload(pairs(kept.numel()), tensor.device)
        indices.copy_(kept)
        values.copy_(flat[kept])
        return payload

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        self._merge(out.zero_(), payload)

    def _merge(self, accumulator: torch.Tensor, payload: torch.Tensor) -> None:
        kept, rest = divmod(payload.numel(), PAIR_BYTES)
        if rest:
            raise CallError(
                f'a payload of the codec "{self.name}" has {PAIR_BYTES} bytes for each element that it keeps'
            )
        indices, values = parts(payload, pairs(kept))
        accumulator.index_add_(0, indices, values.to(accumulator.dtype))


def pairs(count: int) -> Layout:
    """Return the layout of a payload of `count` kept elements."""
    return (torch.int32, count), (torch.float32, count)


PAIR_BYTES = layout_bytes(pairs(1))
